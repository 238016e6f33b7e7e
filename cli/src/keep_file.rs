//! `reprise keep-file`: keeps a copy of a file up to date until SIGTERM or SIGINT.
//!
//! The chart's DaemonSet for seccomp profiles runs it. Kubelets read profiles from the node's file system,
//! and the image has no shell that could copy one there. A file with the right bytes is not written again,
//! and the target is replaced atomically by a rename.
//!
//! The command never removes the target: pods that use a profile cannot restart without it.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use reprise_testkit::output::Audience;

/// Check interval. A removed profile returns before the kubelet gives up starting a pod that needs it.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Permissions of the target: readable by all users, like the kubelet's own files.
const MODE: u32 = 0o644;

/// Largest accepted file; seccomp profiles are smaller.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Arguments of `reprise keep-file`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KeepFileArgs {
    /// Copy this file.
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Write the copy here; the folder must exist.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

/// Result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    #[serde(rename = "kept")]
    Unchanged,
    Written,
}

/// One line of JSON output.
#[derive(Clone, Debug, Serialize)]
struct OutputLine<'a> {
    file: &'a Path,
    outcome: Outcome,
}

pub(crate) fn command(args: &KeepFileArgs, audience: Audience) -> anyhow::Result<()> {
    let runtime = crate::members::runtime()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut previous = None;
        loop {
            let outcome = keep(args)?;
            if previous != Some(Outcome::Unchanged) || outcome == Outcome::Written {
                audience.emit(&OutputLine { file: &args.to, outcome });
                audience.print_line(format!("{}: {outcome:?}", args.to.display()));
            }
            previous = Some(outcome);
            tokio::select! {
                () = tokio::time::sleep(CHECK_EVERY) => {}
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
            }
        }
    })
}

fn keep(args: &KeepFileArgs) -> anyhow::Result<Outcome> {
    let KeepFileArgs { from, to } = args;
    let bytes = fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?.len();
    if bytes > FILE_BYTES_MAX {
        bail!("{} is too large: {bytes} bytes, at most {FILE_BYTES_MAX}", from.display());
    }
    let wanted = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    match fs::read(to) {
        Ok(found) if found == wanted => return Ok(Outcome::Unchanged),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", to.display())),
    }
    write(to, &wanted).with_context(|| format!("cannot write {}", to.display()))?;
    Ok(Outcome::Written)
}

/// Writes to a temporary name and renames it, so that readers never see a partial file.
fn write(to: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut new = to.as_os_str().to_owned();
    new.push(".new");
    let mut file = fs::File::options().write(true).create(true).truncate(true).mode(MODE).open(&new)?;
    file.write_all(bytes)?;
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.sync_all()?;
    fs::rename(&new, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_a_missing_or_different_file_and_leaves_an_equal_one() {
        let folder = std::env::temp_dir().join(format!("reprise-keep-file-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let args = KeepFileArgs { from: folder.join("wanted"), to: folder.join("kept.json") };
        assert!(keep(&args).expect_err("nothing to copy").to_string().contains("wanted"));
        fs::write(&args.from, "{}").expect("the source is written");
        assert_eq!(keep(&args).expect("no error"), Outcome::Written);
        assert_eq!(keep(&args).expect("no error"), Outcome::Unchanged);
        fs::write(&args.to, "spoiled").expect("the target is written");
        assert_eq!(keep(&args).expect("no error"), Outcome::Written);
        assert_eq!(fs::read_to_string(&args.to).expect("the target exists"), "{}");
        assert_eq!(fs::metadata(&args.to).expect("the target exists").permissions().mode() & 0o777, MODE);
        fs::remove_dir_all(&folder).expect("the folder belongs to this test");
    }
}
