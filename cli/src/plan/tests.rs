//! Tests of `reprise plan` on the sample of the conversation trace.

use std::path::Path;

use clap::Parser;
use reprise_simulator::plan::{Configuration, Evaluated};

use super::*;

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

fn error_of(options: &[&str]) -> String {
    format!("{:#}", command(&args(options), Audience::Program).expect_err("refused"))
}

/// Text and plots of a plan.
fn output(args: &PlanArgs, limits: Limits, folder: &Path) -> (String, Vec<Vec<u8>>) {
    output_of(args, limits, folder, |_, _| ())
}

/// Text and plots of a plan whose candidates are changed.
fn output_of(
    args: &PlanArgs,
    limits: Limits,
    folder: &Path,
    change: impl Fn(&Estimator<'_>, &mut Shortlist),
) -> (String, Vec<Vec<u8>>) {
    let machine = Machine::new(&args.hardware, &args.model).expect("valid");
    let load = read(args, limits, Audience::Program).expect("valid");
    let block_bytes = machine.model.kv_bytes_per_token() * load.block_tokens();
    let curves = Curves::new(&load, block_bytes);
    let estimator = Estimator::new(&machine, &load, &curves, args.years);
    let mut list = shortlist(&estimator, args.budget, args.goal()).expect("affordable");
    change(&estimator, &mut list);
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
    let whole = read(&args, Limits::default(), Audience::Program).expect("valid");
    assert!(whole.share >= 1.0 && whole.sessions_replayed == whole.sessions, "{}", whole.share);
    let limits =
        Limits { references: whole.references / 64, timed_references: whole.references / 128, samples: 2 };
    let load = read(&args, limits, Audience::Program).expect("valid");
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
fn a_plan_with_a_cold_store_shows_estimates_and_what_its_price_includes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (text, _) = output_of(&args(&OPTIONS), Limits::default(), folder.path(), |estimator, list| {
        let one = list.candidates.iter().find(|one| one.configuration.dram_gb > 0).expect("a cache");
        let configuration = Configuration { cold: true, ..one.configuration };
        list.best = Evaluated { estimate: estimator.estimate(&configuration), configuration };
    });
    let head = text.split("WHY").next().expect("a first section");
    assert!(head.contains("and a cold store") && head.contains("in the cold store"), "{text}");
    let line =
        |name: &str| head.lines().find(|line| line.trim().starts_with(name)).expect("a line").to_owned();
    assert!(line("TTFT").contains('~') && line("hits").matches('~').count() == 4, "{text}");
    assert!(text.contains("keeps each block for 24.0 hours") && text.contains("not included"), "{text}");
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
