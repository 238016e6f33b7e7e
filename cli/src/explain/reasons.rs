//! Reasons why blocks are on their nodes, read from `/blocks/<key>` of the agents' admin ports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use reprise_policy::BlockKey;
use reprise_proto::controlplane::NodeInfo;
use serde::Deserialize;
use tokio::task::JoinSet;

use reprise_testkit::http::{Client, Response};

use crate::members::Members;

/// Timeout of one request to an agent. A live agent answers within a second.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// Reason why a block is on a node, or the error of asking the node.
pub(super) type Reason = Result<&'static str, String>;

/// Reasons by node number and key.
pub(super) type Reasons = BTreeMap<(u32, BlockKey), Reason>;

/// Fields that are read from an agent's response.
#[derive(Deserialize)]
struct Page {
    node: String,
    origin: String,
}

/// Asks nodes about blocks: all nodes concurrently, and each node for one block after the other.
pub(super) async fn ask(
    asked: &Members,
    nodes: &[NodeInfo],
    blocks: impl IntoIterator<Item = (u32, BlockKey)>,
    timeout: Duration,
) -> Reasons {
    let mut of_nodes: BTreeMap<u32, BTreeSet<BlockKey>> = BTreeMap::new();
    for (node, key) in blocks {
        of_nodes.entry(node).or_default().insert(key);
    }
    let mut asking = JoinSet::new();
    for node in nodes {
        if let Some(keys) = of_nodes.remove(&node.node) {
            asking.spawn(ask_node(asked.agent_client(&node.name), node.clone(), keys, timeout));
        }
    }
    let mut reasons: Reasons = asking.join_all().await.into_iter().flatten().collect();
    for (node, keys) in of_nodes {
        let unlisted = || Err("the node is not in the list of nodes".to_owned());
        reasons.extend(keys.into_iter().map(|key| ((node, key), unlisted())));
    }
    reasons
}

/// Asks one node. After the first timeout or error it is not asked again, so that a hanging node costs one
/// timeout.
async fn ask_node(
    client: Client,
    node: NodeInfo,
    keys: BTreeSet<BlockKey>,
    timeout: Duration,
) -> Vec<((u32, BlockKey), Reason)> {
    let mut failure: Option<String> = None;
    let mut reasons = Vec::with_capacity(keys.len());
    for key in keys {
        let reason = match &failure {
            Some(error) => Err(error.clone()),
            None => match ask_for(&client, &node, &key, timeout).await {
                Ok(response) => parse_reason(&node.name, &response),
                Err(error) => Err(failure.insert(format!("the node does not answer: {error:#}")).clone()),
            },
        };
        reasons.push(((node.node, key), reason));
    }
    reasons
}

async fn ask_for(
    client: &Client,
    node: &NodeInfo,
    key: &BlockKey,
    timeout: Duration,
) -> anyhow::Result<Response> {
    let (client, address, path) = (client.clone(), node.admin_address.clone(), format!("/blocks/{key}"));
    // Name resolution and reading have no overall timeout; after ours, the blocking thread continues alone.
    let asked = tokio::task::spawn_blocking(move || client.ask(&address, &path, timeout));
    let answered = tokio::time::timeout(timeout, asked).await;
    answered.with_context(|| format!("no answer within {timeout:?}"))?.context("asking")?
}

/// Parses an agent's response.
fn parse_reason(node: &str, response: &Response) -> Reason {
    if response.code != 200 {
        let message = response.body.lines().next().unwrap_or_default();
        return Err(format!("the node returned HTTP status {}: {message}", response.code));
    }
    let Page { node: answering, origin } = serde_json::from_str(&response.body)
        .map_err(|error| format!("invalid response of the node: {error}"))?;
    if answering != node {
        return Err(format!("another node, {answering}, answers at the node's admin address"));
    }
    reason_text(&origin).ok_or_else(|| format!("origin '{origin}' is unknown to this version of reprise"))
}

/// Returns the text for an agent's `origin` of a block.
fn reason_text(origin: &str) -> Option<&'static str> {
    match origin {
        "saved" => Some("saved by an engine on this node"),
        "loaded" => Some("fetched from a peer for an engine on this node"),
        "placed" => {
            Some("copied here by placement: peers read it often, or its node is draining or was fuller")
        }
        "recovered" => Some("found on a device when the agent started"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use reprise_identity::Security;

    use super::*;

    const KEY: BlockKey = BlockKey([7; 16]);

    fn response(code: u16, body: &str) -> Response {
        Response { code, body: body.to_owned(), ..Response::default() }
    }

    fn node(number: u32, listener: &TcpListener) -> NodeInfo {
        let admin_address = listener.local_addr().expect("bound").to_string();
        NodeInfo { node: number, name: format!("n{number}"), admin_address, ..NodeInfo::default() }
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").expect("loopback has free ports")
    }

    /// Answers a number of requests with `page`; returns the request lines.
    fn serve(
        listener: TcpListener,
        requests: usize,
        page: &'static str,
    ) -> std::thread::JoinHandle<Vec<String>> {
        std::thread::spawn(move || {
            let connections = listener.incoming().take(requests).map(|stream| stream.expect("a connection"));
            let answer = |mut stream: std::net::TcpStream| {
                let lines = BufReader::new(&stream).lines().map(|line| line.expect("a request"));
                let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                write!(stream, "HTTP/1.0 200 OK\r\n\r\n{page}").expect("the client reads");
                request[0].clone()
            };
            connections.map(answer).collect()
        })
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let output = runtime.block_on(future);
        runtime.shutdown_background();
        output
    }

    #[test]
    fn translates_each_origin_into_a_reason() {
        for (origin, words) in
            [("saved", "saved"), ("loaded", "fetched"), ("placed", "placement"), ("recovered", "found")]
        {
            let page = format!(r#"{{"node": "a", "origin": "{origin}", "dram": null}}"#);
            assert!(parse_reason("a", &response(200, &page)).is_ok_and(|reason| reason.contains(words)));
        }
    }

    #[test]
    fn response_without_a_reason_is_an_error_that_names_the_cause() {
        let refused = |code, body: &str| parse_reason("a", &response(code, body)).expect_err("no reason");
        assert!(refused(404, "it is not on node a\n").ends_with("404: it is not on node a"));
        assert!(refused(200, "no JSON").contains("invalid response"));
        let other = r#"{"node": "b", "origin": "saved"}"#;
        assert!(refused(200, other).contains("another node, b, answers"));
        assert!(refused(200, r#"{"node": "a", "origin": "bought"}"#).contains("'bought'"));
    }

    #[test]
    fn hanging_node_costs_one_timeout_and_does_not_delay_others() {
        let (silent, talking) = (listener(), listener());
        let nodes = [node(1, &silent), node(2, &talking)];
        let asked = serve(talking, 1, r#"{"node": "n2", "origin": "saved"}"#);
        let of_silent = (0..100).map(|number| (1, BlockKey([number; 16])));
        let blocks = of_silent.chain([(2, KEY), (3, KEY)]);
        let members = Members { addresses: Vec::new(), security: Security::Plain };
        let reasons = run(ask(&members, &nodes, blocks, Duration::from_secs(3)));
        assert_eq!(reasons.len(), 102);
        let unanswered =
            |reason: &Reason| reason.as_ref().is_err_and(|error| error.contains("does not answer"));
        assert!((0..100).all(|number| unanswered(&reasons[&(1, BlockKey([number; 16]))])));
        assert!(reasons[&(2, KEY)].as_ref().is_ok_and(|reason| reason.starts_with("saved")));
        assert!(reasons[&(3, KEY)].as_ref().is_err_and(|error| error.contains("not in the list")));
        assert_eq!(asked.join().expect("the server thread ends"), [format!("GET /blocks/{KEY} HTTP/1.1")]);
        // Connections that wait to be accepted.
        silent.set_nonblocking(true).expect("a socket");
        let asked = silent.incoming().take_while(Result::is_ok).count();
        assert!(asked <= 1, "the hanging node was asked {asked} times");
    }
}
