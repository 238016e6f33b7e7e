//! Compiles libFuzzer from the sources of the crate `libfuzzer-sys`, whose folder `make fuzz` names.

use std::path::PathBuf;
use std::{env, fs};

/// Variable with the folder of libFuzzer's sources.
const SOURCES: &str = "REPRISE_FUZZ_SOURCES";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed={SOURCES}");
    let Some(sources) = env::var_os(SOURCES).filter(|_| env::var_os("CARGO_FEATURE_LIBFUZZER").is_some())
    else {
        return;
    };
    let entries = fs::read_dir(&sources).expect("the folder of libFuzzer's sources");
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    // The tests have a `main`.
    let is_part = |path: &PathBuf| {
        path.extension().is_some_and(|kind| kind == "cpp") && !path.ends_with("FuzzerMain.cpp")
    };
    let mut build = cc::Build::new();
    build.files(files.filter(is_part)).cpp(true).std("c++17").opt_level(2).warnings(false);
    build.force_frame_pointer(true).compile("fuzzer");
}
