//! `reprise plan` on the sample of the conversation trace, and on traces and arguments that it refuses.

use std::path::Path;

use reprise_e2e::TestEnv;

use super::run;

const OPTIONS: [&str; 6] = ["--model", "llama-3-8b", "--hardware", "h100", "--budget", "20000"];

fn sample() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/data/conversation_sample.jsonl");
    path.into_os_string().into_string().expect("our folders have plain names")
}

#[test]
fn plan_recommends_a_configuration_with_the_same_bytes_each_time() {
    let trace = sample();
    let arguments = [&["plan", "--trace", &trace][..], &OPTIONS].concat();
    let output = run(&arguments);
    let (text, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    let (_, recommendation) = text.split_once("RECOMMENDATION").expect("a recommendation");
    let (recommendation, _) = recommendation.split_once("WHY").expect("reasons");
    for part in [" × (1 × NVIDIA H100", "USD a month of 20,000", "TTFT", "for a million tokens"] {
        assert!(recommendation.contains(part), "no {part:?} in {recommendation}");
    }
    assert!(text.contains("WHAT THE NEXT DOLLAR BUYS") && text.contains("one more node"), "{text}");
    assert_eq!(run(&arguments).stdout, output.stdout, "equal arguments give equal bytes");
}

/// Request of the conversation format with a time and ids.
fn line(ms: u64, ids: &str) -> String {
    let tokens = 512 * ids.split(',').count();
    format!(
        "{{\"timestamp\": {ms}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": [{ids}]}}\n"
    )
}

#[test]
fn bad_traces_are_refused_with_their_line_and_the_remedy() {
    let env = TestEnv::new();
    let path = env.folder().join("trace.jsonl");
    let name = path.to_str().expect("our folders have plain names");
    let first = line(10, "1, 2");
    let unknown = line(11, "1, 2").replacen('{', "{\"colour\": 3, ", 1);
    let small = line(0, "1, 2, 3, 4").replace("2048", "64");
    for (text, words) in [
        (first.clone() + &line(11, "1, 2").replace("1024", "4096"), ["line 2", "gap", "--allow-gaps"]),
        (first.clone() + &line(9, "1, 2"), ["line 2", "9 ms is before 10 ms", "--sort"]),
        (first.clone() + &unknown, ["line 2", "unknown field `colour`", "remove the field"]),
        (small, ["line 1", "no block size", "--block-tokens 16"]),
        (first.clone() + &line(11, "3, 2"), ["line 2", "hash id 2", "--local-ids"]),
    ] {
        std::fs::write(&path, &text).expect("writable");
        let output = run(&[&["plan", "--trace", name][..], &OPTIONS].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{text} is refused");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
    }
}

#[test]
fn bad_arguments_are_refused_with_the_remedy() {
    let trace = sample();
    for (option, value, words) in [
        ("--budget", "100", ["buys nothing", "--budget 3650"]),
        ("--model", "gpt-5", ["unknown model 'gpt-5'", "with its layout"]),
        ("--hardware", "h300", ["unknown accelerator 'h300'", "h200"]),
    ] {
        let mut options = OPTIONS;
        let place = options.iter().position(|one| *one == option).expect("an option");
        options[place + 1] = value;
        let output = run(&[&["plan", "--trace", &trace][..], &options].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{option} {value} is refused");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
    }
}

#[test]
fn a_ttft_that_no_budget_reaches_is_reported_for_programs() {
    let trace = sample();
    let output = run(&[&["--json", "plan", "--trace", &trace][..], &OPTIONS, &["--ttft", "1ms"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<serde_json::Value> = lines.collect();
    let of_kind = |kind: &str| lines.iter().find(|line| line["kind"] == kind).expect("a line of the kind");
    let (goal, plan) = (of_kind("goal"), of_kind("recommendation"));
    assert_eq!((&goal["is_met"], &goal["ttft_goal_seconds"]), (&false.into(), &0.001.into()));
    assert_eq!(goal["ttft_mean_seconds"], plan["timed"]["ttft_mean_seconds"]);
    assert!(goal["sufficient_budget_usd_per_month"].is_null(), "{goal}");
    assert_eq!(of_kind("subject")["refused_requests"], 0);
}

#[test]
fn profiles_of_users_are_files_and_their_errors_name_the_line() {
    let env = TestEnv::new();
    let path = env.folder().join("link.toml");
    let name = path.to_str().expect("our folders have plain names");
    let text = "[link]\nname = \"mine\"\ntitle = \"Mine\"\n[link.figures]\n\
        gb_per_s = { value = 25, source = \"data sheet\" }\nlatency_us = { value = 5, source = \"data sheet\" }\n";
    let (trace, hardware) = (sample(), format!("h100+{name}"));
    let planned = |text: &str| {
        std::fs::write(&path, text).expect("writable");
        let options = ["plan", "--trace", &trace, "--model", "llama-3-8b", "--hardware", &hardware];
        run(&[&options[..], &["--budget", "20000"]].concat())
    };
    let output = planned(text);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = planned(&text.replace("value = 25", "value = 25000"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("link.toml: line 5: impossible gb_per_s"), "{error}");
    assert!(error.contains("expected 0.01 to 1000, check the unit"), "{error}");
}
