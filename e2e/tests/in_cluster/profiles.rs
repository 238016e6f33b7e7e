//! Slack profiles: the GPUs that a node reports, contents that arrive after the spec, and wrong contents.

use std::fs;

use reprise_e2e::ApiServer;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::in_cluster::node::{Node, condition, condition_message};

/// Returns a profile as the operator writes it, with one window of this slack.
pub(crate) fn content(micros: u32) -> String {
    let tokens = r#""minInputTokens":0,"maxInputTokens":512,"minPrefixTokens":0,"maxPrefixTokens":65536"#;
    let windows =
        format!(r#"[{{"phase":"Decode",{tokens},"layerMicros":90,"slackMicros":{micros},"freeSms":4}}]"#);
    let kernels = r#"[{"iocbs":1,"micros":30,"sms":2}]"#;
    let measurement = format!(
        r#"{{"stepTokens":32,"iocbBytes":1048576,"windows":{windows},"reads":{kernels},"writes":{kernels}}}"#
    );
    let subject =
        r#"{"model":"llama","gpuProduct":"NVIDIA H200","tensorParallel":1,"engineVersion":"vllm 0.33"}"#;
    let more = r#""usablePercent":80,"fallback":"ThrottleWrites","maxErrorPercent":30"#;
    format!(r#"{{"subject":{subject},{more},"measurement":{measurement}}}"#)
}

pub(crate) fn digest(text: &str) -> String {
    let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Simulates the kubelet: writes a text to the file for the content of a digest.
pub(crate) fn write_content(node: &Node<'_>, digest: &str, text: &str) {
    let folder = node.agent.files().config.parent().expect("a file is in a folder");
    let name = format!("profile-{}.json", digest.trim_start_matches("sha256:"));
    fs::write(folder.join(name), text).expect("written");
}

fn profile_spec(digest: &str) -> Value {
    json!({ "profiles": [{ "name": "llama", "digest": digest }] })
}

/// Returns the microseconds of I/O per layer that the profile allows while `tokens` tokens are decoded.
fn micros(node: &Node<'_>, tokens: u32) -> Value {
    node.agent.admin().json(&format!("/slack/llama/Decode/{tokens}/64"))["micros"].clone()
}

pub(crate) fn a_profile_takes_effect_with_its_content_and_wrong_content_is_rejected(server: &ApiServer) {
    let mut node = Node::start(server, "profiled");
    node.env.allow("rejected a slack profile");
    let gpu = node.root().join("proc/driver/nvidia/gpus/0000:19:00.0");
    fs::create_dir_all(&gpu).expect("a folder");
    fs::write(gpu.join("information"), "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0a1b\n").expect("written");
    let status = node.wait_status("the GPU is reported", |status| status["gpus"].is_array());
    assert_eq!(status["gpus"], json!([{ "uuid": "GPU-0a1b", "product": "NVIDIA H200" }]));

    let first = digest(&content(50));
    let status = node.apply_and_wait("the profile waits for its content", profile_spec(&first), |status| {
        condition(status, "ConfigurationApplied") == ("False", "Progressing")
    });
    assert!(
        condition_message(&status, "ConfigurationApplied").contains("of profile llama is not in"),
        "{status}"
    );
    assert!(status["applied"]["profiles"].is_null());
    assert_eq!(node.agent.admin().get("/slack/llama/Decode/9/0").expect("a response").0, 404);
    write_content(&node, &first, &content(50));
    let status =
        node.wait_status("the profile is in effect", |status| status["applied"]["profiles"].is_array());
    assert_eq!(status["applied"]["profiles"], profile_spec(&first)["profiles"]);
    assert_eq!(condition(&status, "ConfigurationApplied"), ("True", "AsDesired"));
    assert_eq!((micros(&node, 511), micros(&node, 512)), (json!(40), Value::Null));
    let outside = node.agent.admin().json("/slack/llama/Prefill/1/0");
    assert_eq!(outside["fallback"], "ThrottleWrites");

    // The digest of the next content is wrong, so the previous profile stays in effect.
    let second = digest(&content(60));
    write_content(&node, &second, &content(61));
    let status = node.apply_and_wait("the content is rejected", profile_spec(&second), |status| {
        status["applied"]["profiles"][0]["refused"].is_string()
    });
    let reported = &status["applied"]["profiles"][0];
    let why = reported["refused"].as_str().expect("checked above");
    assert_eq!(reported["digest"], second);
    assert!(why.contains("its file has digest") && why.contains("stays active"), "{why}");
    assert_eq!(micros(&node, 0), 40);
    write_content(&node, &second, &content(60));
    node.wait_status("the content is accepted", |status| {
        status["applied"]["profiles"] == profile_spec(&second)["profiles"]
    });
    assert_eq!(micros(&node, 0), 48);

    // The profile survives a restart, and ends when the spec no longer names it.
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    assert_eq!(micros(&node, 0), 48);
    node.apply_and_wait("the profile is removed", json!({}), |status| {
        status["applied"]["profiles"].is_null()
    });
    assert_eq!(node.agent.admin().get("/slack/llama/Decode/9/0").expect("a response").0, 404);
}
