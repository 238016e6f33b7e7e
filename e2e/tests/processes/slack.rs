//! Writes in the slack of the layers that engines report: deferral, the flush in decode, and writes at once.

use std::fs;
use std::time::Duration;

use reprise_client::ClientError;
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, PATIENCE, TestEnv};
use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::{Computation, Phase};

/// Profile whose write kernel of 1 MiB takes 30 µs: it fits the windows of decode, but not those of prefill.
fn profile() -> String {
    let window = |phase: &str, micros: u32| {
        let tokens = r#""minInputTokens":0,"maxInputTokens":512,"minPrefixTokens":0,"maxPrefixTokens":65536"#;
        let times = format!(r#""layerMicros":1000000,"slackMicros":{micros},"freeSms":4"#);
        format!(r#"{{"phase":"{phase}",{tokens},{times}}}"#)
    };
    let windows = format!("[{},{}]", window("Prefill", 20), window("Decode", 50));
    let kernels = r#"[{"iocbs":1,"micros":30,"sms":2}]"#;
    let measurement = format!(
        r#"{{"stepTokens":32,"iocbBytes":1048576,"windows":{windows},"reads":{kernels},"writes":{kernels}}}"#
    );
    let subject = r#"{"model":"llama","gpuProduct":"none","tensorParallel":1,"engineVersion":"e2e"}"#;
    let rest = r#""usablePercent":80,"fallback":"ThrottleWrites","maxErrorPercent":30"#;
    format!(r#"{{"subject":{subject},{rest},"measurement":{measurement}}}"#)
}

fn report(engine: &Engine, phase: Option<Phase>) -> Result<LayerGuidance, ClientError> {
    let computation = phase.map(|phase| Computation { phase, input_tokens: 8, prefix_tokens: 64 });
    let model = "llama".to_owned();
    engine.client().report_layer(&LayerReport { model, computation, previous_layer_micros: None })
}

/// Saves eight blocks while the engine computes a prompt, and waits until their writes are due and deferred. Returns
/// their keys' numbers.
fn save_deferred(agent: &Agent, engine: &Engine, first: u64) -> Vec<u64> {
    let stored = agent.admin().counter("stored_blocks_total");
    assert_eq!(report(engine, Some(Phase::Prefill)).expect("an answer").write_iocbs, 0);
    let blocks: Vec<u64> = (first..first + 8).collect();
    engine.save(&blocks).expect("committed");
    let waiting = 8 * small().slot_bytes();
    agent.admin().wait_for("writeback_deferred_bytes", PATIENCE, |bytes| bytes == waiting);
    // As long as twenty delays of the write-back.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(agent.admin().counter("stored_blocks_total"), stored, "the writes wait for a window");
    blocks
}

#[test]
fn writes_wait_for_the_slack_of_reported_layers_and_are_flushed_in_decode() {
    let env = TestEnv::new();
    let path = env.folder().join("llama.json");
    fs::write(&path, profile()).expect("written");
    assert!(device_slot_bytes(&small()) * 8 <= 1 << 20, "eight blocks fit one window of decode");
    let extra = format!("[slack]\nprofiles = [{:?}]", path.display().to_string());
    // No write becomes overdue during the test.
    let slack_delay = Duration::from_secs(60);
    let mut agent = env.agent(&AgentConfig { extra, slack_delay, ..AgentConfig::named("node") });
    assert_eq!(agent.admin().json("/slack/llama/Decode/8/64")["write_iocbs"], 1);
    let engine = agent.engine(small());
    let stored = |count| agent.admin().wait_for("stored_blocks_total", PATIENCE, |stored| stored == count);

    engine.save_durably(&(0..8).collect::<Vec<_>>());
    assert_eq!(agent.admin().counter("writeback_no_report_blocks"), 8, "as without a profile");

    save_deferred(&agent, &engine, 10);
    assert_eq!(report(&engine, Some(Phase::Decode)).expect("an answer").write_iocbs, 1);
    stored(16);
    let counters = agent.admin().counters();
    assert_eq!(
        (counters.get("writeback_decode_blocks"), counters.get("writeback_carried_over_blocks")),
        (8, 8)
    );
    assert_eq!(counters.get("writeback_deferred_bytes"), 0);

    // A client that waits for a commit, an idle engine, and the end of the reporting session: at once.
    let blocks = save_deferred(&agent, &engine, 20);
    let duplicate = engine.save(&blocks[..1]).expect("committed").ticket;
    engine.await_durable(duplicate, 1);
    stored(24);
    save_deferred(&agent, &engine, 30);
    report(&engine, None).expect("an answer");
    stored(32);
    let last = save_deferred(&agent, &engine, 40);
    drop(engine);
    stored(40);
    let counters = agent.admin().counters();
    let reasons = ["awaited", "idle", "no_report", "overdue", "memory"];
    let counted = reasons.map(|reason| counters.get(&format!("writeback_{reason}_blocks")));
    assert_eq!(counted, [8, 8, 16, 0, 0], "{reasons:?}");

    // A stopping agent writes deferred blocks.
    let engine = agent.engine(small());
    let deferred = save_deferred(&agent, &engine, 50);
    agent.stop();
    agent.start();
    let engine = agent.engine(small());
    for blocks in [last, deferred] {
        engine.load_all(&blocks, &LoadParams::LOCAL);
    }
}
