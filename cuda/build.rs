//! Builds the native sources: always for the host, and for GPUs if `nvcc` is there.
//!
//! `nvcc` is taken from `REPRISE_NVCC`, `CUDA_HOME`, or `PATH`. Without one of version 12.8 or later, the crate has no
//! device code and reports so; with a `REPRISE_NVCC` that cannot be used, the build fails.

#[path = "build/nvcc.rs"]
mod nvcc;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvcc::Found;

/// Architectures with machine code; the last one also has PTX, for later GPUs.
const ARCHITECTURES: &[&str] = &["80", "90", "100", "120"];

fn main() {
    let native = PathBuf::from("native");
    let sources = sources(&native);
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    // Sources that are new or gone.
    println!("cargo::rerun-if-changed=native");
    println!("cargo::rerun-if-env-changed=REPRISE_NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rustc-check-cfg=cfg(device_code)");
    let has_extension = |wanted: &str| {
        let wanted = wanted.to_owned();
        sources
            .iter()
            .filter(move |path| path.extension().is_some_and(|extension| *extension == *wanted))
            .cloned()
    };
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .files(has_extension("cpp"))
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .opt_level(2)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .cpp_link_stdlib(None)
        .compile("reprise_cuda_host");
    let units: Vec<PathBuf> = has_extension("cu").collect();
    if let (Some(nvcc), [unit]) = (find_nvcc(), &units[..]) {
        compile_device_code(&nvcc, unit);
        println!("cargo::rustc-cfg=device_code");
    }
}

/// Returns all native sources in order of their names.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder of native sources");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a native source").path()).collect();
    paths.sort();
    paths
}

/// Returns the `nvcc` to use; without one, the build has no device code.
fn find_nvcc() -> Option<PathBuf> {
    let places = nvcc::Places {
        reprise_nvcc: env::var_os("REPRISE_NVCC"),
        cuda_home: env::var_os("CUDA_HOME"),
        path: env::var_os("PATH"),
    };
    match nvcc::find(&places) {
        Found::Usable(program) => Some(program),
        Found::Nothing(reason) => {
            if let Some(reason) = reason {
                println!("cargo::warning=no device code: {reason}");
            }
            None
        }
        Found::Unusable(reason) => panic!("{reason}"),
    }
}

/// Writes one fat binary: machine code for each architecture, and PTX.
fn compile_device_code(nvcc: &Path, unit: &Path) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("OUT_DIR")).join("device_code.fatbin");
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-t0", "-fatbin", "-Werror", "all-warnings", "-lineinfo"]);
    for architecture in ARCHITECTURES {
        let code = if architecture == ARCHITECTURES.last().expect("a constant") {
            format!("[sm_{architecture},compute_{architecture}]")
        } else {
            format!("sm_{architecture}")
        };
        command.arg(format!("-gencode=arch=compute_{architecture},code={code}"));
    }
    let status = command.arg(unit).arg("-o").arg(&out).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} failed for {}: {status}", nvcc.display(), unit.display()),
        Err(error) => {
            panic!("{} cannot be started: {error}", nvcc.display())
        }
    }
}
