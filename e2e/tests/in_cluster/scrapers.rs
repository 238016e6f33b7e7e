//! Scrapers without a client certificate: the API server confirms their token, and that their account may get /metrics.

use std::time::Duration;

use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, TestEnv, wait_until};
use reprise_identity::{Expected, Role};
use reprise_testkit::certificates::Certificates;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::in_cluster::node::{self, Node, REPORTED_WITHIN, Setup};
use crate::resources::rights;

/// Bound on one answer: two reviews of at most 2 s.
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);

/// Status and first line of a page for a client with a token and without a certificate.
fn scrape(node: &Node<'_>, certificates: &Certificates, role: &Role, page: &str, token: &str) -> String {
    let request = format!(
        "GET {page} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let answered = runtime.block_on(async {
        tokio::time::timeout(ANSWERED_WITHIN, async {
            let address = node.agent.admin().address();
            let connected = certificates.connect_anonymously(address, Expected::Role(role.clone())).await;
            let mut stream = connected.expect("the port admits such clients");
            stream.write_all(request.as_bytes()).await.expect("connected");
            stream.flush().await.expect("connected");
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer).await;
            answer
        })
        .await
    });
    answered.expect("an answer in time").lines().next().unwrap_or_default().to_owned()
}

pub(crate) fn only_accounts_that_may_get_metrics_read_those_of_an_agent_with_certificates(
    server: &ApiServer,
) {
    rights::allow_reviews(server, node::AGENT);
    rights::allow_access_reviews(server, node::AGENT);
    let env = TestEnv::new();
    env.allow("refused a request");
    env.require("refused the bearer token of a scraper");
    let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
    let role = Role::Agent("scraped".to_owned());
    let tls = Some(certificates.issue(&role).expect("issued"));
    let setup = Setup { tls, ..Setup::of("scraped") };
    let node = Node::launch(server, env, &setup);
    let scrape = |page: &str, token: &str| scrape(&node, &certificates, &role, page, token);

    let scraper = PodAccount { namespace: "monitoring", name: "prometheus" };
    let token = server.token_for(scraper, None);
    assert_eq!(scrape("/metrics", &token), "HTTP/1.1 403 Forbidden", "its account has no permission");
    rights::allow_metrics(server, scraper);
    wait_until("the metrics", REPORTED_WITHIN, || {
        (scrape("/metrics", &token) == "HTTP/1.1 200 OK").then_some(())
    });
    assert_eq!(scrape("/status", &token), "HTTP/1.1 401 Unauthorized", "tokens are for metrics only");
    let other = server.token_for(PodAccount { namespace: "monitoring", name: "other" }, None);
    for refused in [other.as_str(), "a.b.c", &token[..token.len() - 8]] {
        assert_eq!(scrape("/metrics", refused), "HTTP/1.1 403 Forbidden");
    }
}
