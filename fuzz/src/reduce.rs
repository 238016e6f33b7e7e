//! Reduction of the inputs of all runs to few that reach as much: the committed ones.
//!
//! libFuzzer chooses a set of inputs that reaches all edges. The smallest ones of it are committed, up to a share of the
//! permitted size for each target. Inputs that once failed (`regression-…`) stay.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use reprise_fuzz::{CORPUS_BYTES_MAX, INPUT_BYTES_MAX, committed};

use crate::programs::Target;
use crate::runs::command;
use crate::{Folders, print};

/// Most inputs of a target that are committed, without those that once failed.
const INPUTS_MAX: usize = 40;

/// Share of the permitted size that regressions of all targets may take.
const REGRESSIONS_PART: u64 = 8;

/// Begin of the names of inputs that once failed.
const REGRESSION: &str = "regression-";

/// Reduces the inputs of targets.
pub(crate) fn all(folders: &Folders, targets: &[Target]) -> Result<ExitCode, String> {
    let bytes_max = (CORPUS_BYTES_MAX - CORPUS_BYTES_MAX / REGRESSIONS_PART) / targets.len() as u64;
    for target in targets {
        let kept = one(folders, target, bytes_max)
            .map_err(|error| format!("cannot reduce the inputs of {}: {error}", target.name))?;
        print(&format!("{}: {kept} inputs", target.name));
    }
    Ok(ExitCode::SUCCESS)
}

fn one(folders: &Folders, target: &Target, bytes_max: u64) -> io::Result<usize> {
    let (inputs, kept) = (folders.inputs(&target.name), folders.committed(&target.name));
    let chosen = folders.work.join("chosen");
    if chosen.exists() {
        fs::remove_dir_all(&chosen)?;
    }
    for folder in [&chosen, &inputs, &kept] {
        fs::create_dir_all(folder)?;
    }
    let mut arguments = [&chosen, &inputs, &kept].map(|folder| folder.display().to_string()).to_vec();
    arguments.push("-set_cover_merge=1".to_owned());
    let status = command(target, &arguments).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if !status.success() {
        return Err(io::Error::other("an input fails"));
    }
    for former in committed(&kept).iter().filter(|path| !is_regression(path)) {
        fs::remove_file(former)?;
    }
    let selected = smallest(&chosen, bytes_max)?;
    for path in &selected {
        fs::copy(path, kept.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(selected.len())
}

fn is_regression(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(REGRESSION))
}

/// The smallest files of a folder, up to a sum of sizes. Seeds are not among them: the tests build them.
fn smallest(folder: &Path, bytes_max: u64) -> io::Result<Vec<PathBuf>> {
    let mut sized = Vec::new();
    for path in committed(folder) {
        sized.push((fs::metadata(&path)?.len(), path));
    }
    sized.sort();
    let mut sum = 0;
    let fits = |(bytes, _): &(u64, PathBuf)| {
        sum += bytes;
        sum <= bytes_max && *bytes <= INPUT_BYTES_MAX
    };
    Ok(sized.into_iter().take(INPUTS_MAX).take_while(fits).map(|(_, path)| path).collect())
}
