//! TLS of the demo's cluster, and the commands that it prints for the user.

use std::fs;
use std::path::Path;
use std::process::Command;

use reprise_e2e::process::binary;
use reprise_testkit::cluster::ClusterFile;
use reprise_testkit::http;
use serde_json::Value;

use super::{PATIENCE, output_of, run};

/// Checks that no port serves a page or a call on a plain connection, and that agents state their identity.
pub(super) fn assert_all_ports_use_tls(folder: &str) {
    let cluster = ClusterFile::read(Path::new(folder)).expect("the cluster runs");
    for agent in &cluster.agents {
        let refused = http::ask(&agent.admin, "/status", PATIENCE).expect("an answer");
        assert_eq!(refused.code, 403, "{}: {}", agent.node, refused.body);
        let page = cluster.page(agent, "/status").expect("a page for the administrator");
        let page: Value = serde_json::from_str(&page).expect("JSON");
        assert_eq!(page["tls"]["identity"], format!("reprise://local/agent/{}", agent.node));
    }
    for member in &cluster.members {
        assert_eq!(http::ask(&member.admin, "/nodes", PATIENCE).expect("an answer").code, 403);
        // Without --cluster and --tls, a command has no certificate.
        let refused = run(&["status", "--controlplane", &member.grpc]);
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && stderr.contains("--tls FOLDER"), "{stderr}");
    }
}

/// Runs the commands that the demo prints for the user, as a shell runs them in another working directory.
pub(super) fn assert_printed_commands_succeed(line: &Value, folder: &str) {
    let commands: Vec<&str> =
        line["commands"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let elsewhere = Path::new(folder).join("elsewhere");
    fs::create_dir(&elsewhere).expect("the folder is writable");
    let programs = binary("reprise").parent().expect("programs are in a folder").to_owned();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").expect("a path"));
    for command in &commands {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).env("PATH", &path).env_remove("REPRISE_TLS").current_dir(&elsewhere);
        let output = output_of(shell);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(commands.iter().filter(|command| command.contains(" --tls /")).count() >= 3, "{commands:?}");
}
