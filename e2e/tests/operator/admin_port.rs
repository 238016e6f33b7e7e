//! The operator's admin port with the rights of the chart: probes are open, metrics need TLS and the token of an account
//! that may get them.

use std::io;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{Admin, Operator, PATIENCE, wait_until};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::{Authority, Expected, Identity, Role, Tls};
use reprise_testkit::certificates::connect_anonymously;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::operator::certificates::grant;
use crate::operator::rights;
use crate::operator::test_cluster::{OPERATOR_NAMESPACE, TestCluster};

/// Secret of the operator with the authority of its port.
const SECRET: &str = "reprise-operator-admin";

/// Waits for the authority, and returns a client that trusts it.
fn client(k8s: &TestCluster) -> Tls {
    let secrets: Api<Secret> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    let data = wait_until("the authority", PATIENCE, || {
        k8s.server.block_on(secrets.get_opt(SECRET)).expect("the API server answers")?.data
    });
    let text = |entry: &str| {
        let ByteString(bytes) = data.get(entry).expect("an entry").clone();
        String::from_utf8(bytes).expect("PEM")
    };
    let authority = Authority::load(&text("tls.crt"), &text("tls.key")).expect("an authority");
    let identity = Identity::new(&format!("reprise-operator.{OPERATOR_NAMESPACE}"), Role::Console);
    let issued = authority.issue(&identity.expect("valid names"), CERTIFICATE_VALID).expect("a valid period");
    Tls::new(issued.into_credentials(authority.certificate()).expect("valid files"))
}

/// Status line of the metrics for a client with a token and without a certificate.
fn scrape(k8s: &TestCluster, operator: &Operator, client: &Tls, token: &str) -> io::Result<String> {
    let request = format!(
        "GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    k8s.server.block_on(async {
        let expected = Expected::Role(Role::Operator);
        let mut stream = connect_anonymously(client, operator.admin().address(), expected).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    })
}

#[test]
fn metrics_need_a_token_with_a_permission_and_probes_stay_open() {
    let k8s = TestCluster::new();
    k8s.env.require("refused the bearer token of a scraper");
    k8s.env.require("refused a request");
    // A client that does not trust the first certificate ends its handshake.
    k8s.env.allow("rejected a connection");
    let operator = rights::start_operator_with(&k8s, |_| (), reprise_e2e::OperatorFiles::with_tls);
    let plain = Admin::at(operator.admin().address());
    assert_eq!(plain.get("/healthz").expect("an answer").0, 200);
    assert_eq!(plain.get("/metrics").expect("an answer").0, 403);

    let client = client(&k8s);
    let scraper = PodAccount { namespace: "monitoring", name: "prometheus" };
    let token = k8s.server.token_for(scraper, None);
    let refused = wait_until("a certificate of the authority", PATIENCE, || {
        scrape(&k8s, &operator, &client, &token).ok()
    });
    assert_eq!(refused, "HTTP/1.1 403 Forbidden", "its account has no permission");
    let rule = json!({ "nonResourceURLs": ["/metrics"], "verbs": ["get"] });
    grant(&k8s, "metrics", &scraper.user(), &rule);
    wait_until("the metrics", PATIENCE, || {
        (scrape(&k8s, &operator, &client, &token).ok()? == "HTTP/1.1 200 OK").then_some(())
    });
    let other = k8s.server.token_for(PodAccount { namespace: "monitoring", name: "other" }, None);
    for refused in [other.as_str(), "a.b.c"] {
        let answer = scrape(&k8s, &operator, &client, refused).expect("an answer");
        assert_eq!(answer, "HTTP/1.1 403 Forbidden");
    }
}
