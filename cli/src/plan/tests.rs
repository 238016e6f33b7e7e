//! Tests of `reprise plan` on the sample of the conversation trace.

use std::path::Path;

use super::*;
use clap::Parser;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    args: PlanArgs,
}

fn args(options: &[&str]) -> PlanArgs {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../testkit/data/conversation_sample.jsonl");
    let mut words = vec!["plan", "--trace", trace];
    words.extend_from_slice(options);
    Command::parse_from(words).args
}

const OPTIONS: [&str; 6] = ["--model", "llama-3-8b", "--hardware", "h100", "--budget", "50000"];

fn machine(args: &PlanArgs) -> Machine {
    Machine::new(&args.hardware, &args.model).expect("valid")
}

fn error_of(options: &[&str]) -> String {
    format!("{:#}", command(&args(options), Audience::Program).expect_err("refused"))
}

/// Text and plots of a plan.
fn output(args: &PlanArgs, limits: Limits, folder: &Path) -> (String, Vec<Vec<u8>>) {
    let machine = machine(args);
    let load = read(args, &machine, limits, Audience::Program).expect("valid");
    let block_bytes = machine.model.kv_bytes_per_token() * load.block_tokens();
    let curves = Curves::new(&load, block_bytes);
    let estimator = Estimator::new(&machine, &load, &curves, args.years);
    let list = shortlist(&estimator, args.budget, args.goal()).expect("affordable");
    let report = Report::new(args, &estimator, list, Audience::Program);
    let written = plots::write(&report, folder).expect("writable");
    let files = written.iter().map(|path| std::fs::read(path).expect("written")).collect();
    (text::render(&report), files)
}

#[test]
fn plan_of_the_sample_has_all_sections_and_valid_small_plots_and_is_equal_each_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = args(&OPTIONS);
    let (text, files) = output(&args, Limits::default(), folder.path());
    for section in [
        "RECOMMENDATION",
        "WHY",
        "WHAT THE NEXT DOLLAR BUYS",
        "WHICH TIER FOR WHAT",
        "ENDURANCE",
        "ASSUMPTIONS",
    ] {
        assert!(text.contains(section), "{text}");
    }
    assert!(text.contains("USD a month of 50,000") && text.contains("over 3 years"), "{text}");
    assert_eq!(files.len(), 8);
    for pair in files.chunks(2) {
        let svg = std::str::from_utf8(&pair[0]).expect("text");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.matches("<polyline").count() >= 2 && svg.contains("</text>"), "{svg}");
        let mut reader = png::Decoder::new(std::io::Cursor::new(&pair[1])).read_info().expect("an image");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
        let frame = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((frame.width, frame.height), (960, 600));
        let dark = pixels.iter().filter(|value| **value < 128).count();
        assert!(dark > 5_000, "only {dark} dark values: curves or letters are missing");
        assert!(pair.iter().all(|file| file.len() < 200 << 10), "{} {}", pair[0].len(), pair[1].len());
    }
    assert_eq!((text, files), output(&args, Limits::default(), folder.path()));
}

#[test]
fn sessions_of_an_archive_are_sampled_and_the_output_states_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut args = args(&OPTIONS);
    args.trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../testkit/data/agentic_sample.tar.xz").into();
    let machine = machine(&args);
    let whole = read(&args, &machine, Limits::default(), Audience::Program).expect("valid");
    assert!(whole.share >= 1.0 && whole.sessions_replayed == whole.sessions, "{}", whole.share);
    let limits =
        Limits { references: whole.references / 64, timed_references: whole.references / 128, samples: 2 };
    let load = read(&args, &machine, limits, Audience::Program).expect("valid");
    assert!(load.share < 0.9 && load.sessions_replayed < whole.sessions, "{}", load.share);
    assert_eq!((load.sessions, load.recorded), (whole.sessions, whole.recorded));
    assert!(load.references < whole.references && load.trace().references() < load.references);
    let (text, _) = output(&args, limits, folder.path());
    let sampled =
        format!("Hits by capacity are from {} of {} sessions", load.sessions_replayed, load.sessions);
    assert!(text.contains(&sampled), "{text}");
    let joined = format!("to one of {} tokens", load.block_tokens());
    assert!(
        text.contains(&joined) && text.contains("from 2 replays with the same sessions at other times"),
        "{text}"
    );
    assert!(text.contains("Replays with time have a part") && text.contains("in the first"), "{text}");
}

#[test]
fn a_cold_store_is_replayed_and_the_output_states_its_bytes_and_its_estimates() {
    let folder = tempfile::tempdir().expect("a folder");
    let (text, _) = output(&args(&OPTIONS), Limits::default(), folder.path());
    assert!(text.contains("The cold store holds") && text.contains("are estimates"), "{text}");
    let alternative = text.lines().find(|line| line.trim().starts_with("with a cold store"));
    assert!(alternative.is_some_and(|line| !line.contains('~')), "{text}");
    assert!(!text.split("WHY").next().expect("a first section").contains("a cold store"), "{text}");
}

#[test]
fn a_ttft_that_the_budget_does_not_reach_is_reported_with_a_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits = Limits { samples: 1, ..Limits::default() };
    let with = |ttft: &str| {
        let args = args(&[&OPTIONS[..], &["--ttft", ttft][..]].concat());
        let (text, _) = output(&args, limits, folder.path());
        text
    };
    let text = with("1ms");
    assert!(text.contains("NOT MET: a mean TTFT of at most 1 ms"), "{text}");
    assert!(text.contains("pass a longer --ttft"), "{text}");
    assert!(text.contains("because none within the budget has at most 1 ms"), "{text}");
    let text = with("30s");
    assert!(text.contains("met: a mean TTFT of at most 30.00 s") && !text.contains("NOT MET"), "{text}");
}

#[test]
fn the_line_of_a_goal_has_the_shortest_ttft_and_the_budget_that_is_enough() {
    use reprise_simulator::plan::{Configuration, Evaluated, Reached};
    let args = args(&OPTIONS);
    let machine = machine(&args);
    let load = read(&args, &machine, Limits::default(), Audience::Program).expect("valid");
    let curves = Curves::new(&load, machine.model.kv_bytes_per_token() * load.block_tokens());
    let configuration = Configuration::without_cache(20);
    let estimate = Estimator::new(&machine, &load, &curves, 3.0).estimate(&configuration);
    let beyond_budget = Some((Evaluated { configuration, estimate }, 0.9));
    let reached = Reached { goal_seconds: 1.0, ttft_seconds: 1.2, beyond_budget };
    let line = serde_json::to_value(lines::goal(&reached)).expect("a line");
    assert_eq!((&line["is_met"], &line["ttft_mean_seconds"]), (&false.into(), &1.2.into()));
    let enough = line["sufficient_budget_usd_per_month"].as_f64().expect("known");
    assert_eq!((enough.round(), &line["sufficient_nodes"]), (73_000.0, &20.into()));
}

#[test]
fn refused_requests_are_stated_with_their_share() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("long.jsonl");
    let line = |at: u64, blocks: u64| {
        let ids: Vec<u64> = (0..blocks).map(|block| at * 1_000 + block).collect();
        let tokens = blocks * 512;
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": 0, \"hash_ids\": {ids:?}}}\n"
        )
    };
    // One of five requests has 300 of 340 blocks, more than the context of 131,072 tokens.
    let lines: String = (0..5).map(|at| line(at * 1_000, if at == 2 { 300 } else { 10 })).collect();
    std::fs::write(&path, lines).expect("writable");
    let mut args = args(&OPTIONS);
    args.trace = path;
    let (text, _) = output(&args, Limits { samples: 1, ..Limits::default() }, folder.path());
    assert!(text.contains("without 1 of 5 requests (20.0 %, with 88.2 % of the tokens)"), "{text}");
    assert!(text.contains("1 are longer than the context of 131072 tokens"), "{text}");
}

#[test]
fn hardware_and_model_can_be_files_whose_errors_name_the_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("writable");
        path.display().to_string()
    };
    let ssd = "[device]\nname = \"mine\"\ntitle = \"Mine\"\n[device.figures]\n\
        capacity_tb = { value = 1.6, source = \"s\" }\nread_gb_per_s = { value = 7, source = \"s\" }\n\
        write_gb_per_s = { value = 3, source = \"s\" }\nlatency_us = { value = 80, source = \"s\" }\n\
        drive_writes_per_day = { value = 3, source = \"s\" }\nusd_per_gb_hour = { value = 0.0001, source = \"s\" }\n";
    let model = include_str!("../../../simulator/profiles/models/llama-3-8b.toml");
    let hardware = format!("h100+{}", write("ssd.toml", ssd));
    let own = write("model.toml", &model.replace("Llama 3 8B", "My model"));
    let files = profile_files::read(&[&hardware, &own]).expect("readable");
    let machine = Machine::with_files(&hardware, &own, &files).expect("valid");
    assert_eq!((machine.ssds.len(), machine.ssds[0].bytes), (1, 1_600_000_000_000));
    assert_eq!((machine.ssds[0].name.as_str(), machine.model.title.as_str()), ("mine", "My model"));
    let error = |hardware: &str, model: &str| {
        error_of(&["--model", model, "--hardware", hardware, "--budget", "50000"])
    };
    let bad = format!("h100+{}", write("bad.toml", &ssd.replace("value = 7", "value = 7000")));
    let text = error(&bad, "llama-3-8b");
    assert!(text.contains("bad.toml: line 6: impossible read_gb_per_s 7000"), "{text}");
    let cut = write("cut.toml", &model[..model.find("[layout]").expect("a layout")]);
    let text = error("h100", &cut);
    assert!(
        text.contains("cut.toml: model without a known layout") && text.contains("config.json"),
        "{text}"
    );
    let text = error("h100", "./none.toml");
    assert!(text.contains("cannot read the profile ./none.toml: name a file"), "{text}");
}

#[test]
fn bad_arguments_name_the_value_and_the_remedy() {
    let with =
        |model, hardware, budget| error_of(&["--model", model, "--hardware", hardware, "--budget", budget]);
    let error = with("gpt-5", "h100", "50000");
    assert!(error.contains("'gpt-5'") && error.contains("llama-3-8b"), "{error}");
    let error = with("llama-3-8b", "tpu", "50000");
    assert!(error.contains("'tpu'") && error.contains("h200"), "{error}");
    let error = with("llama-3-8b", "h100", "100");
    assert!(error.contains("buys nothing") && error.contains("--budget 3650"), "{error}");
    let words = ["plan", "--trace", "x", "--model", "m", "--hardware", "h", "--budget", "lots"];
    let error = Command::try_parse_from(words).expect_err("no amount").to_string();
    assert!(error.contains("invalid budget \"lots\"") && error.contains("/3years"), "{error}");
}

#[test]
fn traces_with_gaps_are_refused_with_their_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("gap.jsonl");
    let line = r#"{"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]}"#;
    let gap = r#"{"timestamp": 9, "input_length": 4096, "output_length": 1, "hash_ids": [1, 2, 3, 4]}"#;
    std::fs::write(&path, format!("{line}\n{gap}\n")).expect("writable");
    let mut args = args(&OPTIONS);
    args.trace = path;
    let error = format!("{:#}", command(&args, Audience::Program).expect_err("a gap"));
    assert!(error.contains("line 2") && error.contains("--allow-gaps"), "{error}");
}

#[test]
fn work_on_all_processors_keeps_the_order_of_the_items() {
    let items: Vec<u64> = (0..100).collect();
    assert_eq!(in_parallel(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
    assert!(in_parallel(&[] as &[u64], |item| *item).is_empty());
}
