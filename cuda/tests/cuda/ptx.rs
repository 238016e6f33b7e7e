//! The device code as PTX: the instructions that order memory between GPU, CPU and devices.
//!
//! Needs `nvcc`: from `REPRISE_NVCC`, or fetched by `make cuda-toolkit`. Where it must exist (`make test`),
//! `REPRISE_REQUIRE_NVCC` makes its absence a failure.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns `nvcc`, or `None` where no toolkit was fetched.
fn nvcc() -> Option<PathBuf> {
    if let Some(path) = env::var_os("REPRISE_NVCC") {
        return Some(path.into());
    }
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cache = env::var_os("REPRISE_CACHE").map_or_else(|| home.join(".cache/reprise"), PathBuf::from);
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let toolkit = |folder: &Path| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda-toolkit-"))
    };
    let found = entries.map(|entry| entry.path()).find(|path| toolkit(path));
    let nvcc = found.map(|folder| folder.join("nvidia/cu13/bin/nvcc")).filter(|path| path.is_file());
    assert!(
        nvcc.is_some() || env::var_os("REPRISE_REQUIRE_NVCC").is_none(),
        "no nvcc: run make cuda-toolkit, or set REPRISE_NVCC"
    );
    nvcc
}

/// Compiles a source to PTX for an architecture; warnings are errors.
fn ptx(nvcc: &Path, source: &Path, architecture: &str) -> String {
    let native = Path::new(env!("CARGO_MANIFEST_DIR")).join("native");
    let name = source.file_stem().expect("a name").to_string_lossy();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{architecture}.ptx"));
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "-ptx", "-Werror", "all-warnings"])
        .arg(format!("-arch=compute_{architecture}"))
        .arg("-I")
        .arg(native)
        .arg(source)
        .arg("-o")
        .arg(&target)
        .output()
        .expect("nvcc starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(target).expect("PTX")
}

/// Returns the instructions of one kernel, in order.
fn kernel<'a>(ptx: &'a str, name: &str) -> Vec<&'a str> {
    let lines = ptx.lines().skip_while(|line| !(line.contains(".entry") && line.contains(name)));
    let body = lines.skip_while(|line| !line.starts_with('{')).take_while(|line| !line.starts_with('}'));
    let instructions: Vec<&str> = body.map(str::trim).filter(|line| line.ends_with(';')).collect();
    assert!(!instructions.is_empty(), "no kernel {name}");
    instructions
}

/// Returns the place of the only instruction that starts with `start`.
fn only(instructions: &[&str], start: &str) -> usize {
    let places: Vec<usize> =
        (0..instructions.len()).filter(|&at| instructions[at].starts_with(start)).collect();
    assert_eq!(places.len(), 1, "{start} in {instructions:#?}");
    places[0]
}

const PROBE: &str = r#"
#include "platform.h"
extern "C" __global__ void probe_doorbell(uint32_t* entry, uint32_t* doorbell) {
  *entry = 7;
  reprise::ring_doorbell(doorbell, 1);
}
extern "C" __global__ void probe_acquire(const uint32_t* phase, const uint32_t* data, uint32_t* result) {
  *result = reprise::load_acquire(phase) + *data;
}
extern "C" __global__ void probe_release(uint32_t* phase, uint32_t* data) {
  *data = 7;
  reprise::store_release(phase, 1);
}
"#;

#[test]
fn doorbells_and_phases_use_the_instructions_for_devices() {
    let Some(nvcc) = nvcc() else {
        println!("not checked: no nvcc");
        return;
    };
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe.cu");
    fs::write(&source, PROBE).expect("the probe");
    for architecture in ["80", "90", "120"] {
        let text = ptx(&nvcc, &source, architecture);
        let doorbell = kernel(&text, "probe_doorbell");
        // The entry is visible to the whole system before the doorbell is written, and the doorbell is an MMIO store.
        let entry = only(&doorbell, "st.global.u32");
        let fence =
            doorbell.iter().position(|line| line.starts_with("membar.sys") || line.starts_with("fence"));
        let mmio = only(&doorbell, "st.mmio.relaxed.sys.global.u32");
        let fence = fence.expect("a fence at system scope");
        assert!(entry < fence && fence < mmio, "{architecture}: {doorbell:#?}");
        assert!(doorbell[fence].contains(".sys"), "{}", doorbell[fence]);
        // Data is read after the phase.
        let acquire = kernel(&text, "probe_acquire");
        let phase = only(&acquire, "ld.acquire.sys.global.u32");
        let data = only(&acquire, "ld.global");
        assert!(phase < data, "{architecture}: {acquire:#?}");
        // Data is written before the phase.
        let release = kernel(&text, "probe_release");
        let data = only(&release, "st.global.u32");
        let phase = only(&release, "st.release.sys.global.u32");
        assert!(data < phase, "{architecture}: {release:#?}");
    }
}

#[test]
fn copies_access_16_bytes_and_load_before_they_store() {
    let Some(nvcc) = nvcc() else {
        println!("not checked: no nvcc");
        return;
    };
    let device = Path::new(env!("CARGO_MANIFEST_DIR")).join("native/device.cu");
    let text = ptx(&nvcc, &device, "90");
    for name in ["reprise_gather", "reprise_scatter"] {
        let instructions = kernel(&text, &format!("{name}("));
        let loads: Vec<usize> = places(&instructions, "ld.global.cs.v4");
        let stores: Vec<usize> = places(&instructions, "st.global.cs.v4");
        assert_eq!((loads.len(), stores.len()), (8, 8), "{name}: independent accesses of a lane");
        assert!(loads.last() < stores.first(), "{name}: all loads are in flight before the first store");
    }
    for name in ["reprise_gather_checked(", "reprise_scatter_checked("] {
        assert_eq!(places(&kernel(&text, name), "ld.global.cs.v4").len(), 4, "{name}");
    }
}

/// Returns the places of instructions that contain `part`; conditional ones have a predicate first.
fn places(instructions: &[&str], part: &str) -> Vec<usize> {
    (0..instructions.len()).filter(|&at| instructions[at].contains(part)).collect()
}
