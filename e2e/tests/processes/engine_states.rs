//! Eviction classes of blocks while an engine reports that their requests run, are preempted, and end.

use std::time::Duration;

use reprise_client::{Client, ConnectOptions};
use reprise_e2e::{Agent, PATIENCE, TestEnv, wait_until};
use reprise_policy::prefetch::{BegunRequest, HINT_VERSION, Lookahead, RequestState};
use reprise_policy::{BlockKey, Layout};
use reprise_testkit::engine;
use reprise_testkit::model::{self, SCALE_DEFAULT};

use super::admin_commands::{PROMPT, agent, save};

const REQUEST: u64 = 3;

fn connect(agent: &Agent, layout: Layout) -> Client {
    let options = ConnectOptions::new(&agent.files().socket, engine::namespace(&layout), layout);
    Client::connect(options.client_name("engine")).expect("connects")
}

fn report(client: &Client, begun: Option<Vec<BegunRequest>>) -> u32 {
    let iteration = Duration::from_millis(20);
    let hint = Lookahead { version: HINT_VERSION, iteration, begun, ..Lookahead::default() };
    client.report_lookahead(&hint).expect("accepted").ignored
}

fn listed(state: RequestState, first: u32, keys: &[BlockKey]) -> Vec<BegunRequest> {
    vec![BegunRequest { request: REQUEST, state, first, keys: keys.to_vec() }]
}

fn class(agent: &Agent, key: BlockKey) -> String {
    agent.admin().json(&format!("/blocks/{key}"))["class"].as_str().expect("a class").to_owned()
}

#[test]
fn blocks_have_the_class_of_their_request_until_its_engine_dies() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    let layout = model::llama_3_8b_scaled(SCALE_DEFAULT).expect("valid");
    let chain: Vec<u64> = PROMPT.collect();
    let client = connect(&agent, layout);
    let keys: Vec<BlockKey> = engine::chain_keys(client.namespace(), &chain);
    assert_eq!(class(&agent, keys[0]), "recent");

    assert_eq!(report(&client, Some(listed(RequestState::Running, 0, &keys[..4]))), 0);
    assert_eq!((class(&agent, keys[0]), class(&agent, keys[4])), ("active".into(), "recent".into()));
    assert_eq!(report(&client, Some(listed(RequestState::Running, 4, &keys[4..5]))), 0);
    assert_eq!(class(&agent, keys[4]), "active");
    assert_eq!(report(&client, Some(listed(RequestState::Preempted, 0, &[]))), 0);
    assert_eq!(class(&agent, keys[4]), "idle");
    assert_eq!(report(&client, Some(listed(RequestState::Running, 6, &keys[6..]))), 1, "a gap in its keys");
    assert_eq!((class(&agent, keys[4]), class(&agent, keys[6])), ("active".into(), "recent".into()));
    assert_eq!(agent.admin().counter("begun_blocks"), 5);

    // As after a crash, the session ends without a word.
    drop(client);
    wait_until("the session has ended", PATIENCE, || (class(&agent, keys[0]) == "recent").then_some(()));
    assert_eq!(agent.admin().counter("begun_blocks"), 0);
    let client = connect(&agent, layout);
    assert_eq!(report(&client, Some(listed(RequestState::Running, 0, &[]))), 1, "its keys must travel again");
    assert_eq!(class(&agent, keys[0]), "recent");
}
