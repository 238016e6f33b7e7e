//! Slack profiles: the GPUs that a node has, contents that come a little later than the wish for them, and such as are not what they should be.

use std::fs;

use reprise_e2e::ApiServer;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::node::{Node, condition, words};

/// As the operator writes it, with windows of so many microseconds.
fn content(micros: u32) -> String {
    let windows = format!(
        r#"[{{"phase":"Decode","minTokens":0,"maxTokens":512,"slackMicros":{micros},"maxIoSms":4}}]"#
    );
    let subject =
        r#"{"model":"llama","gpuProduct":"NVIDIA H200","tensorParallel":1,"engineVersion":"vllm 0.33"}"#;
    let more = r#""usablePercent":80,"fallback":"ThrottleWrites","maxErrorPercent":30"#;
    format!(r#"{{"subject":{subject},{more},"windows":{windows}}}"#)
}

fn digest(text: &str) -> String {
    let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Plays the kubelet: puts a text where the content of a digest is looked for.
fn bring(node: &Node<'_>, digest: &str, text: &str) {
    let folder = node.agent.files().config.parent().expect("a file is in a folder");
    let name = format!("profile-{}.json", digest.trim_start_matches("sha256:"));
    fs::write(folder.join(name), text).expect("written");
}

fn wish(digest: &str) -> Value {
    json!({ "profiles": [{ "name": "llama", "digest": digest }] })
}

/// Microseconds that I/O may take of a layer while so many tokens are decoded.
fn micros(node: &Node<'_>, tokens: u32) -> Value {
    node.agent.admin().json(&format!("/slack/llama/Decode/{tokens}"))["micros"].clone()
}

pub(crate) fn a_profile_is_in_effect_once_its_content_has_come_and_a_wrong_one_is_refused_in_words(
    server: &ApiServer,
) {
    let mut node = Node::start(server, "profiled");
    node.world.allow("a slack profile is refused");
    let gpu = node.root().join("proc/driver/nvidia/gpus/0000:19:00.0");
    fs::create_dir_all(&gpu).expect("a folder");
    fs::write(gpu.join("information"), "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0a1b\n").expect("written");
    let status = node.wait_status("the GPU is told", |status| status["gpus"].is_array());
    assert_eq!(status["gpus"], json!([{ "uuid": "GPU-0a1b", "product": "NVIDIA H200" }]));

    let first = digest(&content(50));
    let status = node.bring("it waits for the content", wish(&first), |status| {
        condition(status, "ConfigurationApplied") == ("False", "Progressing")
    });
    assert!(words(&status, "ConfigurationApplied").contains("of profile llama is not in"), "{status}");
    assert!(status["applied"]["profiles"].is_null());
    assert_eq!(node.agent.admin().get("/slack/llama/Decode/9").expect("an answer").0, 404);
    bring(&node, &first, &content(50));
    let status = node.wait_status("it is in effect", |status| status["applied"]["profiles"].is_array());
    assert_eq!(status["applied"]["profiles"], wish(&first)["profiles"]);
    assert_eq!(condition(&status, "ConfigurationApplied"), ("True", "AsDesired"));
    assert_eq!((micros(&node, 511), micros(&node, 512)), (json!(40), Value::Null));
    let outside = node.agent.admin().json("/slack/llama/Prefill/1");
    assert_eq!(outside["fallback"], "ThrottleWrites");

    // The next one is not what its name says, and the one before stays.
    let second = digest(&content(60));
    bring(&node, &second, &content(61));
    let status = node.bring("it is refused", wish(&second), |status| {
        status["applied"]["profiles"][0]["refused"].is_string()
    });
    let told = &status["applied"]["profiles"][0];
    let why = told["refused"].as_str().expect("checked above");
    assert_eq!(told["digest"], second);
    assert!(
        why.contains("the content of its file has the digest") && why.contains("stays in effect"),
        "{why}"
    );
    assert_eq!(micros(&node, 0), 40);
    bring(&node, &second, &content(60));
    node.wait_status("it is taken", |status| status["applied"]["profiles"] == wish(&second)["profiles"]);
    assert_eq!(micros(&node, 0), 48);

    // A restart finds it again, and what is wanted no more ends.
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    assert_eq!(micros(&node, 0), 48);
    node.bring("it is gone", json!({}), |status| status["applied"]["profiles"].is_null());
    assert_eq!(node.agent.admin().get("/slack/llama/Decode/9").expect("an answer").0, 404);
}
