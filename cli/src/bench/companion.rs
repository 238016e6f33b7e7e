//! A process beside what is measured: a store of KV beside an engine, an API server beside an operator. A shell runs it and ends it with its own standard input, so that it ends
//! with this program whatever happens.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::cluster::stop;

/// Until it is ready to be used: imports of seconds, and ten times that on a machine with as much else to do.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// Between two looks.
const READY_PAUSE: Duration = Duration::from_millis(50);

/// Runs a script, then whatever it has started until the end of the input.
const UNTIL_INPUT_ENDS: &str = r#"
set -eu
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 1' TERM
. "$REPRISE_SCRIPT"
: > "$REPRISE_READY"
cat > /dev/null
"#;

/// What is run.
#[derive(Clone, Debug)]
pub(super) struct Script<'a> {
    /// Starts processes in the background and returns when they can be used.
    pub(super) text: &'a str,
    pub(super) variables: Vec<(&'static str, String)>,
    /// In a network namespace of its own.
    pub(super) own_network: bool,
    /// Where files and words go; `name` is that of both.
    pub(super) folder: &'a Path,
    pub(super) name: &'static str,
}

/// A running one.
pub(super) struct Companion {
    child: Child,
    input: Option<ChildStdin>,
}

impl Companion {
    /// Starts it and waits until it is ready.
    pub(super) fn start(script: &Script<'_>) -> anyhow::Result<Companion> {
        let path = |extension: &str| script.folder.join(format!("{}.{extension}", script.name));
        let (text, ready, log) = (path("sh"), path("ready"), path("log"));
        fs::write(&text, script.text).with_context(|| format!("cannot write {}", text.display()))?;
        drop(fs::remove_file(&ready));
        let words = fs::File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let shell = ["bash", "-c", UNTIL_INPUT_ENDS];
        let in_namespace = ["unshare", "--net", "--"];
        let words_of_command: Vec<&str> =
            if script.own_network { [&in_namespace[..], &shell].concat() } else { shell.to_vec() };
        let mut child = Command::new(words_of_command[0])
            .args(&words_of_command[1..])
            .env("REPRISE_SCRIPT", &text)
            .env("REPRISE_READY", &ready)
            .envs(script.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(words.try_clone().context("a second handle of a log")?)
            .stderr(words)
            .spawn()
            .with_context(|| format!("cannot start {}", words_of_command[0]))?;
        let input = child.stdin.take();
        let mut companion = Companion { child, input };
        companion.await_ready(&ready, &log)?;
        Ok(companion)
    }

    /// Its process, in whose network it is.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn await_ready(&mut self, ready: &Path, log: &PathBuf) -> anyhow::Result<()> {
        let give_up = Instant::now() + READY_WITHIN;
        while !ready.exists() {
            let ended = self.child.try_wait().context("looking after a process")?;
            if ended.is_some() || Instant::now() > give_up {
                let said = fs::read_to_string(log).unwrap_or_default();
                bail!("it does not start; its log {}:\n{said}", log.display());
            }
            std::thread::sleep(READY_PAUSE);
        }
        Ok(())
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        drop(self.input.take());
        let give_up = Instant::now() + Duration::from_secs(10);
        while Instant::now() < give_up && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(READY_PAUSE);
        }
        stop(&mut self.child);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script<'a>(folder: &'a Path, text: &'a str) -> Script<'a> {
        Script { text, variables: Vec::new(), own_network: false, folder, name: "companion" }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("reprise-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("writable");
        folder
    }

    #[test]
    fn what_a_companion_has_started_ends_with_it() {
        let folder = folder("companion-ends");
        let text = format!("sleep 1000 & echo $! > {}/pid", folder.display());
        let companion = Companion::start(&script(&folder, &text)).expect("a shell is everywhere");
        let pid = fs::read_to_string(folder.join("pid")).expect("it was written before it was ready");
        let process = PathBuf::from(format!("/proc/{}", pid.trim()));
        assert!(process.exists());
        assert!(PathBuf::from(format!("/proc/{}", companion.pid())).exists());
        drop(companion);
        assert!(!process.exists());
        fs::remove_dir_all(&folder).expect("it is ours");
    }

    #[test]
    fn one_that_fails_is_told_in_its_own_words() {
        let folder = folder("companion-fails");
        let result = Companion::start(&script(&folder, "echo no such port >&2; false"));
        let error = result.err().expect("it has failed").to_string();
        assert!(error.contains("no such port"), "{error}");
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
