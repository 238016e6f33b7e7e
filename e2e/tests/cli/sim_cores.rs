//! `reprise sim cores` on the sample of the conversation trace.

use std::path::Path;

use super::{number, objects, run};

fn sample() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/data/conversation_sample.jsonl");
    path.into_os_string().into_string().expect("our folders have plain names")
}

#[test]
fn equal_arguments_print_equal_bytes_with_the_hits_of_all_tiers() {
    let trace = sample();
    let arguments = ["--json", "sim", "cores", "--trace", &trace, "--compare"];
    let sized = [&arguments[..], &["--dram", "400", "--nvme", "1600"]].concat();
    let lines = objects(&sized);
    let [cores, comparison] = &lines[..] else { panic!("two lines instead of {lines:?}") };
    assert_eq!((number(cores, "/requests"), number(cores, "/dram_blocks")), (400, 400));
    for source in ["own_dram", "own_nvme", "peer_dram", "peer_nvme"] {
        assert!(number(cores, &format!("/hits/{source}")) > 0, "{source}: {cores}");
    }
    assert_eq!(comparison["sources"].as_array().map(Vec::len), Some(5), "{comparison}");
    assert_eq!(run(&sized).stdout, run(&sized).stdout);
}

#[test]
fn impossible_arguments_are_refused_with_the_remedy() {
    let trace = sample();
    for (arguments, words) in [
        (["--hardware", "h100+dvd"], "unknown part 'dvd'"),
        (["--model", "llama-9"], "unknown model 'llama-9'"),
        (["--policy", "belady"], "cost_aware"),
        (["--model", "llama-3-70b"], "do not fit into the memory of h100"),
    ] {
        let output = run(&[&["sim", "cores", "--trace", &trace], &arguments[..]].concat());
        let error = String::from_utf8(output.stderr).expect("text");
        assert!(!output.status.success() && error.contains(words), "{arguments:?}: {error}");
    }
}
