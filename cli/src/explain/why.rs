//! Why blocks are where they are: what their nodes' agents say of them, at `/blocks/<key>` of their admin ports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use reprise_policy::BlockKey;
use reprise_proto::controlplane::NodeInfo;
use serde::Deserialize;
use tokio::task::JoinSet;

use crate::http::{self, Answer};

/// Bound on one answer of an agent, which answers within a second or not at all.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// Why a block is on a node, in words; or why that is not known.
pub(super) type Why = Result<&'static str, String>;

/// By number of the node and key.
pub(super) type Whys = BTreeMap<(u32, BlockKey), Why>;

/// What is read of an agent's answer.
#[derive(Deserialize)]
struct Page {
    node: String,
    origin: String,
}

/// Asks nodes about blocks: all nodes at once, each about one block after the other.
pub(super) async fn ask(
    nodes: &[NodeInfo],
    blocks: impl IntoIterator<Item = (u32, BlockKey)>,
    patience: Duration,
) -> Whys {
    let mut of_nodes: BTreeMap<u32, BTreeSet<BlockKey>> = BTreeMap::new();
    for (node, key) in blocks {
        of_nodes.entry(node).or_default().insert(key);
    }
    let mut asking = JoinSet::new();
    for node in nodes {
        if let Some(keys) = of_nodes.remove(&node.node) {
            asking.spawn(ask_node(node.clone(), keys, patience));
        }
    }
    let mut whys: Whys = asking.join_all().await.into_iter().flatten().collect();
    for (node, keys) in of_nodes {
        let unlisted = || Err("it is not among the nodes of the cluster".to_owned());
        whys.extend(keys.into_iter().map(|key| ((node, key), unlisted())));
    }
    whys
}

/// Asks one node. One that does not answer is not asked again: that costs its patience once.
async fn ask_node(
    node: NodeInfo,
    keys: BTreeSet<BlockKey>,
    patience: Duration,
) -> Vec<((u32, BlockKey), Why)> {
    let mut silent: Option<String> = None;
    let mut whys = Vec::with_capacity(keys.len());
    for key in keys {
        let why = match &silent {
            Some(error) => Err(error.clone()),
            None => match ask_for(&node.admin_address, &key, patience).await {
                Ok(answer) => why_of(&node.name, &answer),
                Err(error) => Err(silent.insert(format!("it does not answer: {error:#}")).clone()),
            },
        };
        whys.push(((node.node, key), why));
    }
    whys
}

async fn ask_for(address: &str, key: &BlockKey, patience: Duration) -> anyhow::Result<Answer> {
    let (address, path) = (address.to_owned(), format!("/blocks/{key}"));
    // Names are looked up and answers read without a bound on the whole; the thread goes on by itself.
    let asked = tokio::task::spawn_blocking(move || http::ask(&address, &path, patience));
    let answered = tokio::time::timeout(patience, asked).await;
    answered.with_context(|| format!("nothing came within {patience:?}"))?.context("asking")?
}

/// What an agent's answer says.
fn why_of(node: &str, answer: &Answer) -> Why {
    if answer.code != 200 {
        let said = answer.body.lines().next().unwrap_or_default();
        return Err(format!("it answers with HTTP status {}: {said}", answer.code));
    }
    let Page { node: answering, origin } =
        serde_json::from_str(&answer.body).map_err(|error| format!("its answer cannot be read: {error}"))?;
    if answering != node {
        return Err(format!("at its admin address, node {answering} answers"));
    }
    words(&origin).ok_or_else(|| format!("its reason '{origin}' is unknown to this version of reprise"))
}

/// An agent's word for why it has a block, for people.
fn words(origin: &str) -> Option<&'static str> {
    match origin {
        "saved" => Some("saved by an engine of this node"),
        "loaded" => Some("fetched from a peer for an engine of this node"),
        "placed" => Some("copied here by placement: peers kept reading it, or its node drains or was fuller"),
        "recovered" => Some("found on a device when the agent started"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    const KEY: BlockKey = BlockKey([7; 16]);

    fn answer(code: u16, body: &str) -> Answer {
        Answer { code, body: body.to_owned() }
    }

    fn node(number: u32, listener: &TcpListener) -> NodeInfo {
        let admin_address = listener.local_addr().expect("bound").to_string();
        NodeInfo { node: number, name: format!("n{number}"), admin_address, ..NodeInfo::default() }
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").expect("loopback has free ports")
    }

    /// Answers so many requests like this; returns what was asked for.
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
    fn a_reason_that_an_agent_gives_is_told_in_words() {
        for (origin, words) in
            [("saved", "saved"), ("loaded", "fetched"), ("placed", "placement"), ("recovered", "found")]
        {
            let page = format!(r#"{{"node": "a", "origin": "{origin}", "dram": null}}"#);
            assert!(why_of("a", &answer(200, &page)).is_ok_and(|said| said.contains(words)));
        }
    }

    #[test]
    fn an_answer_that_gives_no_reason_says_why_there_is_none() {
        let refused = |code, body: &str| why_of("a", &answer(code, body)).expect_err("no reason");
        assert!(refused(404, "it is not on node a\n").ends_with("404: it is not on node a"));
        assert!(refused(200, "no JSON").contains("cannot be read"));
        let other = r#"{"node": "b", "origin": "saved"}"#;
        assert!(refused(200, other).contains("node b answers"));
        assert!(refused(200, r#"{"node": "a", "origin": "bought"}"#).contains("'bought'"));
    }

    #[test]
    fn a_node_that_says_nothing_costs_its_patience_once_and_the_others_nothing() {
        let (silent, talking) = (listener(), listener());
        let nodes = [node(1, &silent), node(2, &talking)];
        let asked = serve(talking, 1, r#"{"node": "n2", "origin": "saved"}"#);
        let of_silent = (0..100).map(|number| (1, BlockKey([number; 16])));
        let blocks = of_silent.chain([(2, KEY), (3, KEY)]);
        let whys = run(ask(&nodes, blocks, Duration::from_secs(1)));
        assert_eq!(whys.len(), 102);
        let unanswered = |why: &Why| why.as_ref().is_err_and(|error| error.contains("does not answer"));
        assert!((0..100).all(|number| unanswered(&whys[&(1, BlockKey([number; 16]))])));
        assert!(whys[&(2, KEY)].as_ref().is_ok_and(|said| said.starts_with("saved")));
        assert!(whys[&(3, KEY)].as_ref().is_err_and(|error| error.contains("not among")));
        assert_eq!(asked.join().expect("served"), [format!("GET /blocks/{KEY} HTTP/1.0")]);
        // Connections that wait to be accepted.
        silent.set_nonblocking(true).expect("a socket");
        let asked = silent.incoming().take_while(Result::is_ok).count();
        assert!(asked <= 1, "who does not answer is not asked again, and was {asked} times");
    }
}
