//! The admin port: what operators and tools rely on.

use crate::blocks::{connect, load_all, save_durably};
use crate::process::{Config, Home};

#[test]
fn a_running_agent_is_healthy_and_ready_and_says_what_it_is() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    assert_eq!(agent.get("/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(agent.get("/readyz"), (200, "ready\n".to_owned()));
    let client = connect(&agent.socket);
    let status = agent.status();
    assert_eq!(status["node"]["name"], "test");
    assert_eq!(status["arena"]["bytes"], 32 << 20);
    assert_eq!(status["devices"][0]["formatted"], true);
    assert_eq!(status["sessions"][0]["client"], "test");
    assert_eq!(status["sessions"][0]["pid"], std::process::id());
    assert_eq!(status["controlplane"]["stand_alone"], true);
    drop(client);
    agent.await_counter("sessions", 0);
}

#[test]
fn what_engines_do_shows_in_the_metrics() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..20);
    load_all(&client, 0..20);
    assert_eq!(client.trim().expect("trimmed"), 20);
    load_all(&client, 0..20);
    let (code, text) = agent.get("/metrics");
    assert_eq!(code, 200);
    for line in [
        "reprise_agent_committed_blocks_total 20",
        "reprise_agent_hit_blocks_own_dram_total 20",
        "reprise_agent_hit_blocks_own_nvme_total 20",
        "reprise_agent_nvme_blocks 20",
        "reprise_agent_stored_blocks_total 20",
        "reprise_agent_phase_seconds_count{phase=\"commit\"} 1",
        "reprise_agent_phase_seconds_count{phase=\"load_first_layer\"} 2",
        "reprise_agent_phase_seconds_count{phase=\"load_total\"} 2",
        "reprise_agent_device_lost{device=\"0\"} 0",
        "reprise_agent_peer_requests_total 0",
        "reprise_agent_directory_connected 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no line '{line}' in:\n{text}");
    }
}
