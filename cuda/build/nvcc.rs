//! The `nvcc` that compiles the device code.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// First version with all architectures of the device code.
pub(crate) const VERSION_MIN: (u32, u32) = (12, 8);

/// Where an `nvcc` may be: the values of environment variables.
#[derive(Default)]
pub(crate) struct Places {
    /// `REPRISE_NVCC`: this program and no other.
    pub(crate) reprise_nvcc: Option<OsString>,
    /// `CUDA_HOME`: a folder with `bin/nvcc`.
    pub(crate) cuda_home: Option<OsString>,
    /// `PATH`: folders of programs.
    pub(crate) path: Option<OsString>,
}

/// Result of the search for an `nvcc`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A program that compiles the device code.
    Usable(PathBuf),
    /// None was asked for, and none is usable: the reason if there is one of no use.
    Nothing(Option<String>),
    /// `REPRISE_NVCC` cannot be used, and why.
    Unusable(String),
}

/// Looks for an `nvcc` in `REPRISE_NVCC` alone, or in `CUDA_HOME` and `PATH`, and checks its version.
pub(crate) fn find(places: &Places) -> Found {
    if let Some(program) = &places.reprise_nvcc {
        let program = PathBuf::from(program);
        return match check(&program) {
            Ok(()) => Found::Usable(program),
            Err(reason) => Found::Unusable(format!(
                "REPRISE_NVCC: {reason}; set it to an nvcc {}.{} or later (cuda/toolkit.sh fetches one), or unset it to build without device code",
                VERSION_MIN.0, VERSION_MIN.1
            )),
        };
    }
    let home = places.cuda_home.as_ref().map(|home| Path::new(home).join("bin/nvcc"));
    let folders = places.path.iter().flat_map(std::env::split_paths);
    let on_path = folders.map(|folder| folder.join("nvcc"));
    let mut reason = None;
    for program in home.into_iter().chain(on_path).filter(|program| program.is_file()) {
        match check(&program) {
            Ok(()) => return Found::Usable(program),
            Err(why) => reason = reason.or(Some(why)),
        }
    }
    Found::Nothing(reason)
}

/// Checks that a program is an `nvcc` of a sufficient version.
fn check(program: &Path) -> Result<(), String> {
    let name = program.display();
    let output = Command::new(program).arg("--version").output();
    let output = output.map_err(|error| format!("{name} cannot be started: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match version(&text) {
        Some(found) if found >= VERSION_MIN => Ok(()),
        Some((major, minor)) => Err(format!(
            "{name} is version {major}.{minor}: expected at least {}.{}",
            VERSION_MIN.0, VERSION_MIN.1
        )),
        None => Err(format!("{name} does not report a version of nvcc")),
    }
}

/// Returns the version in the output of `nvcc --version`: `release 13.0, V13.0.48`.
fn version(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("release ")?;
    let (major, minor) = rest.split([',', ' ', '\n']).next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
