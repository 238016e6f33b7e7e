//! `reprise keep-file`: sees to it that a file of a node is what it should be, until it is told to end.
//!
//! The chart's DaemonSet for seccomp profiles runs it: kubelets read profiles from the node's own file system, and an image
//! without a shell has nobody else who could put one there. What has the right bytes is not written again; what is
//! written appears whole, under its name.
//!
//! Deliberately absent: removal. Pods that run by a profile cannot be started again without it.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::output::Audience;

/// A profile that somebody removes is back before a pod that needs it has been given up.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Readable for everybody, as the kubelet's own files are.
const MODE: u32 = 0o644;

/// Larger files than this are no profiles.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Arguments of `reprise keep-file`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KeepFileArgs {
    /// What the file should be.
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// The file. Its folder must be there.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

/// What a look has led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Kept,
    Written,
}

/// One line for programs.
#[derive(Clone, Debug, Serialize)]
struct Told<'a> {
    file: &'a Path,
    outcome: Outcome,
}

/// `reprise keep-file`.
pub(crate) fn command(args: &KeepFileArgs, audience: Audience) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut told = None;
        loop {
            let outcome = keep(args)?;
            if told != Some(Outcome::Kept) || outcome == Outcome::Written {
                audience.emit(&Told { file: &args.to, outcome });
                audience.say(format!("{}: {outcome:?}", args.to.display()));
            }
            told = Some(outcome);
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
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
        bail!("{} has {bytes} bytes, more than {FILE_BYTES_MAX}: it is no profile", from.display());
    }
    let wanted = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    match fs::read(to) {
        Ok(found) if found == wanted => return Ok(Outcome::Kept),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", to.display())),
    }
    write(to, &wanted).with_context(|| format!("cannot write {}", to.display()))?;
    Ok(Outcome::Written)
}

/// Under another name first, so that nobody reads a half.
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
    fn a_file_that_is_missing_or_differs_is_written_and_one_that_is_right_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("reprise-keep-file-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let args = KeepFileArgs { from: folder.join("wanted"), to: folder.join("kept.json") };
        assert!(keep(&args).expect_err("nothing to copy").to_string().contains("wanted"));
        fs::write(&args.from, "{}").expect("written");
        assert_eq!(keep(&args).expect("kept"), Outcome::Written);
        assert_eq!(keep(&args).expect("kept"), Outcome::Kept);
        fs::write(&args.to, "spoiled").expect("written");
        assert_eq!(keep(&args).expect("kept"), Outcome::Written);
        assert_eq!(fs::read_to_string(&args.to).expect("read"), "{}");
        assert_eq!(fs::metadata(&args.to).expect("there").permissions().mode() & 0o777, MODE);
        fs::remove_dir_all(&folder).expect("one's own folder");
    }
}
