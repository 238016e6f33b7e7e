//! Events that clients can repeat at will cause only a handful of log lines; counters have their number.

use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::flood::{garbage, garbage_at};
use reprise_e2e::{AgentConfig, LoadParams, PATIENCE, TestEnv, logs, wait_until};

/// Number of connections with garbage to each port.
const GARBAGE: usize = 300;

/// Maximum number of log lines about them: one for each kind of event, and some reserve.
const LINES_MAX: usize = 8;

fn bad_lines(log: &std::path::Path) -> Vec<String> {
    let text = logs::read(log);
    let bad = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
    text.lines().filter(bad).map(str::to_owned).collect()
}

fn assert_few(log: &std::path::Path) {
    let lines = bad_lines(log);
    assert!(lines.len() <= LINES_MAX, "{} lines:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn garbage_on_every_port_is_counted_and_causes_a_handful_of_log_lines() {
    let env = TestEnv::new();
    for words in ["session rejected", "protocol error", "peer connection lost"] {
        env.allow(words);
    }
    let mut plane = env.control_plane(Store::Memory);
    let config =
        AgentConfig { control_plane: vec![plane.address().to_owned()], ..AgentConfig::named("node") };
    let mut agent = env.agent(&config);
    let peer_address = || {
        let nodes = plane.admin().json("/nodes");
        Some(nodes[0]["peer_endpoints"][0]["address"].as_str()?.to_owned())
    };
    let peer_address = wait_until("a registered agent", PATIENCE, peer_address);
    garbage_at(&agent.files().socket, GARBAGE);
    garbage(&peer_address, GARBAGE);
    garbage(agent.admin().address(), GARBAGE);
    garbage(plane.address(), GARBAGE);
    garbage(plane.admin().address(), GARBAGE);

    let engine = agent.engine(small());
    engine.save_durably(&[1]);
    engine.load_all(&[1], &LoadParams::CLUSTER);
    assert_eq!(plane.offers("node"), Some(true));
    let count = GARBAGE as f64;
    let of_agent = |listener: &str| {
        let labels = format!("listener=\"{listener}\",reason=\"protocol\"");
        agent.admin().metric("reprise_agent_connections_rejected_total", &labels)
    };
    assert_eq!((of_agent("sessions"), of_agent("admin")), (count, count));
    assert_eq!(agent.admin().metric("reprise_agent_peer_protocol_errors_total", ""), count);
    for listener in ["grpc", "admin"] {
        let labels = format!("listener=\"{listener}\",reason=\"protocol\"");
        let counted = plane.admin().metric("reprise_controlplane_connections_rejected_total", &labels);
        assert_eq!(counted, count, "listener {listener}");
    }

    assert_few(&agent.files().log);
    assert_few(&env.folder().join("controlplane.log"));
    // An agent logs the pending counts when it stops.
    agent.stop();
    let counts = bad_lines(&agent.files().log);
    let counted =
        |line: &String| line.contains("repeated") && line.contains(&format!("count={}", GARBAGE - 1));
    assert_eq!(counts.iter().filter(|line| counted(line)).count(), 2, "{counts:#?}");
    plane.kill();
}
