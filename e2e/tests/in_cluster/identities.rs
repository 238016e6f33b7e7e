//! Whose pods are whose: sessions are checked by tokens that the API server has issued, by what a file says, and also while the server is away.

use std::fs;
use std::path::{Path, PathBuf};

use reprise_client::{Client, ClientError, ConnectOptions, SessionKeeper};
use reprise_e2e::content::small;
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, World, wait_until};
use reprise_policy::NamespaceDigest;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::node::{Node, Setup, TOLD_WITHIN};
use crate::{node, rights};

/// The audience of tokens for agents.
const OURS: &str = "reprise.dev";

/// Pods of the namespace `chat` are tenant `team-a`.
const BOUND: &str = r#"{"tenants":["team-a"],"namespaces":{"chat":"team-a"},"serviceAccounts":{}}"#;

/// Nobody is kept for anybody.
const NOBODY: &str = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;

/// An agent that reads whose pods are whose, as the operator's pods let it.
fn start<'a>(server: &'a ApiServer, name: &'a str) -> (Node<'a>, PathBuf) {
    rights::allow_reviews(server, node::AGENT);
    let world = World::new();
    let file = world.folder().join("tenants.json");
    fs::write(&file, BOUND).expect("written");
    let told = ("TENANTS_FILE".to_owned(), file.display().to_string());
    let node = Node::launch(server, world, &Setup { environment: vec![told], ..Setup::of(name) });
    node.want(json!({}));
    node.wait_ready();
    (node, file)
}

/// A token as a pod of the account finds it in a file.
fn token(server: &ApiServer, world: &World, namespace: &str, audience: Option<&str>) -> PathBuf {
    let token = server.token_for(PodAccount { namespace, name: "vllm" }, audience);
    let path = world.folder().join(format!("{namespace}-{}", audience.unwrap_or("server")));
    fs::write(&path, token + "\n").expect("written");
    path
}

/// Opens a session as an engine of a tenant, whose blocks have a namespace of their own.
fn connect(node: &Node<'_>, tenant: &str, token: Option<&Path>) -> Result<Client, ClientError> {
    let namespace = NamespaceDigest(Sha256::digest(tenant.as_bytes()).into());
    let options = ConnectOptions::new(node.agent.files().socket.clone(), namespace, small())
        .tenant(tenant.parse().expect("a name"));
    Client::connect(match token {
        Some(path) => options.token_file(path),
        None => options,
    })
}

/// Kind and words of a refusal.
fn refused(node: &Node<'_>, tenant: &str, token: Option<&Path>) -> (&'static str, String) {
    let error = connect(node, tenant, token).expect_err("it must be refused");
    (error.kind(), error.to_string())
}

pub(crate) fn a_tenant_that_names_its_pods_is_theirs_alone(server: &ApiServer) {
    let (node, file) = start(server, "whose");
    node.world.require("session refused");
    let token = |namespace, audience| token(server, &node.world, namespace, audience);
    let (ours, others, for_the_server) =
        (token("chat", Some(OURS)), token("elsewhere", Some(OURS)), token("chat", None));
    drop(connect(&node, "team-a", Some(&ours)).expect("its own pod"));
    drop(connect(&node, "default", None).expect("nobody is kept out of what nobody has"));
    drop(connect(&node, "default", Some(&others)).expect("so may a pod that is nobody's"));
    for (tenant, token, wanted, words) in [
        ("team-a", None, "BadRequest", "REPRISE_TOKEN_FILE"),
        ("team-a", Some(&others), "Busy", "elsewhere/vllm"),
        ("team-a", Some(&for_the_server), "BadRequest", OURS),
        ("default", Some(&ours), "Busy", "REPRISE_TENANT"),
    ] {
        let (kind, message) = refused(&node, tenant, token.map(PathBuf::as_path));
        assert!(kind == wanted && message.contains(words), "{kind}: {message}");
    }
    let forged = node.world.folder().join("forged");
    let text = fs::read_to_string(&ours).expect("it is there");
    let (rest, signature) = text.rsplit_once('.').expect("a token has three parts");
    fs::write(&forged, format!("{rest}.{}", signature.trim().chars().rev().collect::<String>()))
        .expect("written");
    assert_eq!(refused(&node, "team-a", Some(&forged)).0, "BadRequest");

    // What the agent works by is told, and what is new is taken over without a restart.
    let digest = |text: &str| {
        let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{hex}")
    };
    node.wait_status("it says whose pods are whose", |status| {
        status["applied"]["tenantsDigest"] == digest(BOUND)
    });
    fs::write(&file, NOBODY).expect("written");
    node.wait_status("it has taken it over", |status| status["applied"]["tenantsDigest"] == digest(NOBODY));
    drop(connect(&node, "team-a", None).expect("it is believed again"));

    // An engine that comes before its binding goes on without, and has its session once that has come.
    let late = BOUND.replace("chat", "elsewhere");
    fs::write(&file, BOUND).expect("written");
    node.wait_status("it is bound again", |status| status["applied"]["tenantsDigest"] == digest(BOUND));
    let namespace = NamespaceDigest(Sha256::digest("team-a").into());
    let options = ConnectOptions::new(node.agent.files().socket.clone(), namespace, small());
    let engine = SessionKeeper::new(options.tenant("team-a".parse().expect("a name")).token_file(&others));
    let engine = engine.expect("a thread is to be had");
    wait_until("it to be refused", TOLD_WITHIN, || engine.status().last_error.map(drop));
    assert!(engine.current().is_none());
    fs::write(&file, &late).expect("written");
    wait_until("its session", TOLD_WITHIN, || engine.current().map(drop));
}

pub(crate) fn while_the_server_is_away_only_pods_that_it_has_known_are_a_kept_tenant() {
    let world = World::new();
    let mut server = world.api_server();
    node::install(&server);
    let (agent, of_agent, known, unknown) = {
        let (node, _) = start(&server, "outage");
        let known = token(&server, &node.world, "chat", Some(OURS));
        let unknown = node.world.folder().join("unknown");
        let another = server.token_for(PodAccount { namespace: "chat", name: "another" }, Some(OURS));
        fs::write(&unknown, another).expect("written");
        drop(connect(&node, "team-a", Some(&known)).expect("its own pod"));
        let Node { agent, world, .. } = node;
        (agent, world, known, unknown)
    };
    of_agent.require("session refused");
    of_agent.allow("cannot be watched");
    server.kill();
    let node = Node::again(&server, of_agent, agent, "outage");
    drop(connect(&node, "team-a", Some(&known)).expect("it was known a moment ago"));
    drop(connect(&node, "default", Some(&unknown)).expect("no matter whose it is"));
    let (kind, message) = refused(&node, "team-a", Some(&unknown));
    assert!(kind == "Busy" && message.contains("try again"), "{kind}: {message}");
    drop(node);
    server.restart();
}
