//! An agent evicts the tail of a prefix chain first, so that a match still finds its head.

use reprise_client::Scope;
use reprise_e2e::content::large;
use reprise_e2e::{AgentConfig, Engine, LoadParams, TestEnv};
use reprise_policy::ByteSize;

/// Number of blocks that fit into the arena.
const ROOM: u64 = 128;
const PROMPT: u64 = 80;
const OTHERS: u64 = 60;

/// Blocks of one commit: a part of a prompt, as an engine computes it.
const PART: usize = 16;

/// Saves a prompt as an engine does, in parts.
fn save_prompt(engine: &Engine, blocks: std::ops::Range<u64>) {
    let blocks: Vec<u64> = blocks.collect();
    let mut parent = None;
    for part in blocks.chunks(PART) {
        let committed = engine.save_with_parent(parent, part).expect("there is room");
        assert!(committed.statuses.iter().all(|status| status.is_committed()));
        parent = part.last().copied();
    }
}

#[test]
fn a_match_finds_the_remaining_head_of_a_prompt() {
    let env = TestEnv::new();
    let agent = env.agent(&AgentConfig {
        arena: ByteSize(ROOM * large().slot_bytes()),
        region: ByteSize(ROOM / 4 * large().slot_bytes()),
        pool: None,
        ..AgentConfig::named("node")
    });
    let engine = agent.engine(large());
    save_prompt(&engine, 0..PROMPT);
    save_prompt(&engine, 1000..1000 + OTHERS);
    let prompt: Vec<u64> = (0..PROMPT).collect();
    let found = engine.matches(&prompt, Scope::Local).len();
    assert_eq!(found as u64, ROOM - OTHERS);

    // A load counts as a use: older blocks are evicted first, and then the tail of the loaded ones.
    engine.load_all(&prompt[..found], &LoadParams::LOCAL);
    save_prompt(&engine, 2000..2000 + OTHERS);
    assert_eq!(engine.matches(&prompt, Scope::Local).len(), found);
    save_prompt(&engine, 3000..3000 + OTHERS);
    save_prompt(&engine, 4000..4000 + OTHERS);
    assert_eq!(engine.matches(&prompt, Scope::Local).len(), found - OTHERS as usize);
    assert_eq!(agent.admin().counter("dram_blocks"), ROOM);
}
