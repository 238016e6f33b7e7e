//! What survives the death of an agent: all that was announced as durable, and nothing wrong.

use reprise_client::{BlockStatus, Scope};

use crate::blocks::{connect, key, keys, load, load_all, save, save_durably, verify};
use crate::process::{Config, Home};

#[test]
fn what_was_announced_as_durable_is_back_after_sigkill_and_every_byte_is_right() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..100);
    agent.kill();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    let sources = client.match_keys(&keys(0..100), Scope::Local).expect("an answer");
    assert_eq!(sources.len(), 100);
    load_all(&client, 0..100);
    assert_eq!(agent.status()["devices"][0]["recovered_blocks"], 100);
    assert_eq!(home.complaints(), Vec::<String>::new());
}

#[test]
fn a_kill_at_any_moment_leaves_only_right_blocks_and_misses() {
    let home = Home::new();
    let mut announced: Vec<u64> = Vec::new();
    for round in 0..20u64 {
        let agent = home.start(&Config::default());
        let client = connect(&agent.socket);
        let everything: Vec<u64> = (0..round * 10).collect();
        if !everything.is_empty() {
            let (held, statuses) = load(&client, &everything);
            assert!(
                statuses.iter().all(|status| matches!(status, BlockStatus::Ok | BlockStatus::Miss)),
                "{statuses:?}"
            );
            verify(&client, &held, &everything);
            for number in &announced {
                assert_eq!(
                    statuses[*number as usize],
                    BlockStatus::Ok,
                    "block {number} was announced as durable"
                );
            }
        }
        // Some rounds are killed with the write-back under way, some after the notice.
        let numbers: Vec<u64> = (round * 10..round * 10 + 10).collect();
        let ticket = save(&client, numbers.iter().copied());
        if round % 3 != 0 {
            let outcome = client.wait_durable(ticket, crate::blocks::PATIENCE).expect("a notice");
            announced.extend(numbers.iter().filter(|number| !outcome.lost_keys.contains(&key(**number))));
        }
        agent.kill();
    }
    assert!(announced.len() >= 100);
}

#[test]
fn a_pool_that_is_full_goes_on_by_forgetting_the_oldest() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    // 64 MiB of pool hold fewer than 1,000 blocks of 64 KiB and their headers.
    for start in (0..1500).step_by(50) {
        save_durably(&client, start..start + 50);
    }
    assert!(agent.counter("nvme_evictions") > 0);
    load_all(&client, 1450..1500);
    agent.kill();
    let agent = home.start(&Config::default());
    load_all(&connect(&agent.socket), 1450..1500);
}
