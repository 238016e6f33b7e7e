//! Bindings of tenants to pods: sessions are checked with tokens of the API server and a file with the
//! bindings, also while the server is down.

use std::fs;
use std::path::{Path, PathBuf};

use reprise_client::{Client, ClientError, ConnectOptions, SessionKeeper};
use reprise_e2e::content::{NAMESPACE, small};
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, TestEnv, wait_until};
use reprise_policy::TenantName;
use reprise_testkit::configuration;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::in_cluster::node;
use crate::in_cluster::node::{Node, REPORTED_WITHIN, Setup};
use crate::resources::rights;

/// The audience of tokens for agents.
const AUDIENCE: &str = "reprise.dev";

/// Binds tenant `team-a` to the pods of namespace `chat`.
const BOUND: &str = r#"{"tenants":["team-a"],"namespaces":{"chat":"team-a"},"serviceAccounts":{}}"#;

/// Binds no tenant to any pods.
const UNBOUND: &str = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;

/// Starts an agent that reads the bindings from a file, like in the operator's pods.
fn start<'a>(server: &'a ApiServer, name: &'a str) -> (Node<'a>, PathBuf) {
    rights::allow_reviews(server, node::AGENT);
    let env = TestEnv::new();
    let file = env.folder().join("tenants.json");
    fs::write(&file, BOUND).expect("written");
    let variable = ("TENANTS_FILE".to_owned(), file.display().to_string());
    let node = Node::launch(server, env, &Setup { environment: vec![variable], ..Setup::of(name) });
    node.apply_spec(json!({}));
    node.wait_ready();
    (node, file)
}

/// Writes a token of a pod of the account to a file.
fn token(server: &ApiServer, env: &TestEnv, namespace: &str, audience: Option<&str>) -> PathBuf {
    let token = server.token_for(PodAccount { namespace, name: "vllm" }, audience);
    let path = env.folder().join(format!("{namespace}-{}", audience.unwrap_or("server")));
    fs::write(&path, token + "\n").expect("written");
    path
}

/// Opens a session as an engine of a tenant.
fn connect(node: &Node<'_>, tenant: &str, token: Option<&Path>) -> Result<Client, ClientError> {
    let tenant: TenantName = tenant.parse().expect("a name");
    let socket = &node.agent.files().socket;
    configuration::provide_salt(socket, &tenant).expect("the folder is the test's");
    let options = ConnectOptions::new(socket.clone(), NAMESPACE, small()).tenant(tenant);
    Client::connect(match token {
        Some(path) => options.token_file(path),
        None => options,
    })
}

/// Opens a session, which must be rejected. Returns the kind and the text of the error.
fn refused(node: &Node<'_>, tenant: &str, token: Option<&Path>) -> (&'static str, String) {
    let error = connect(node, tenant, token).expect_err("the session must be rejected");
    (error.kind(), error.to_string())
}

pub(crate) fn only_the_pods_of_a_bound_tenant_may_use_it(server: &ApiServer) {
    let (node, file) = start(server, "whose");
    node.env.require("session rejected");
    let token = |namespace, audience| token(server, &node.env, namespace, audience);
    let (own, other, for_the_server) =
        (token("chat", Some(AUDIENCE)), token("elsewhere", Some(AUDIENCE)), token("chat", None));
    drop(connect(&node, "team-a", Some(&own)).expect("a pod of the tenant"));
    drop(connect(&node, "default", None).expect("an unbound tenant needs no token"));
    drop(connect(&node, "default", Some(&other)).expect("an unbound pod may use an unbound tenant"));
    for (tenant, token, wanted, words) in [
        ("team-a", None, "BadRequest", "REPRISE_TOKEN_FILE"),
        ("team-a", Some(&other), "Busy", "elsewhere/vllm"),
        ("team-a", Some(&for_the_server), "BadRequest", AUDIENCE),
        ("default", Some(&own), "Busy", "REPRISE_TENANT"),
    ] {
        let (kind, message) = refused(&node, tenant, token.map(PathBuf::as_path));
        assert!(kind == wanted && message.contains(words), "{kind}: {message}");
    }
    let forged = node.env.folder().join("forged");
    let text = fs::read_to_string(&own).expect("the token exists");
    let (rest, signature) = text.rsplit_once('.').expect("a token has three parts");
    fs::write(&forged, format!("{rest}.{}", signature.trim().chars().rev().collect::<String>()))
        .expect("written");
    assert_eq!(refused(&node, "team-a", Some(&forged)).0, "BadRequest");

    // The agent reports the digest of its bindings, and applies new bindings without a restart.
    let digest = |text: &str| {
        let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{hex}")
    };
    node.wait_status("the bindings are reported", |status| {
        status["applied"]["tenantsDigest"] == digest(BOUND)
    });
    fs::write(&file, UNBOUND).expect("written");
    node.wait_status("the new bindings are applied", |status| {
        status["applied"]["tenantsDigest"] == digest(UNBOUND)
    });
    drop(connect(&node, "team-a", None).expect("an unbound tenant needs no token"));

    // An engine that starts before its binding continues without a session, and gets one once the binding is
    // applied.
    let late = BOUND.replace("chat", "elsewhere");
    fs::write(&file, BOUND).expect("written");
    node.wait_status("the tenant is bound again", |status| {
        status["applied"]["tenantsDigest"] == digest(BOUND)
    });
    let options = ConnectOptions::new(node.agent.files().socket.clone(), NAMESPACE, small());
    let engine = SessionKeeper::new(options.tenant("team-a".parse().expect("a name")).token_file(&other));
    let engine = engine.expect("a thread can be spawned");
    wait_until("the session to be rejected", REPORTED_WITHIN, || engine.status().last_error.map(drop));
    assert!(engine.current().is_none());
    fs::write(&file, &late).expect("written");
    wait_until("the engine's session", REPORTED_WITHIN, || engine.current().map(drop));
}

pub(crate) fn without_the_api_server_only_known_pods_may_use_a_bound_tenant() {
    let env = TestEnv::new();
    let mut server = env.api_server();
    node::install(&server);
    let (agent, agent_env, known, unknown) = {
        let (node, _) = start(&server, "outage");
        let known = token(&server, &node.env, "chat", Some(AUDIENCE));
        let unknown = node.env.folder().join("unknown");
        let another = server.token_for(PodAccount { namespace: "chat", name: "another" }, Some(AUDIENCE));
        fs::write(&unknown, another).expect("written");
        drop(connect(&node, "team-a", Some(&known)).expect("a pod of the tenant"));
        let Node { agent, env, .. } = node;
        (agent, env, known, unknown)
    };
    agent_env.require("session rejected");
    agent_env.allow("cannot watch the CacheNode");
    server.kill();
    let node = Node::with_running_agent(&server, agent_env, agent, "outage");
    drop(connect(&node, "team-a", Some(&known)).expect("the token was verified before"));
    drop(connect(&node, "default", Some(&unknown)).expect("an unbound tenant needs no token"));
    let (kind, message) = refused(&node, "team-a", Some(&unknown));
    assert!(kind == "Busy" && message.contains("retry"), "{kind}: {message}");
    drop(node);
    server.restart();
}
