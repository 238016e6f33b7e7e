//! Helper process of a measurement: a KV store for an engine. A shell runs it
//! and ends it at the end of its own standard input, so that it always ends with this program.

use std::fs;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use reprise_testkit::cluster::STOP_WITHIN;
use reprise_testkit::process::{ChildProcess, append, read_log};

/// Time limit until it is ready: imports take seconds, and ten times that on a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(300);

const READY_PAUSE: Duration = Duration::from_millis(50);

/// Runs a script, waits for the end of the input, and ends the processes that the script started.
const UNTIL_INPUT_ENDS: &str = r#"
set -eu
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 1' TERM
. "$REPRISE_SCRIPT"
: > "$REPRISE_READY"
cat > /dev/null
"#;

/// Script that starts the helper process.
#[derive(Clone, Debug)]
pub(crate) struct Script<'a> {
    /// Starts processes in the background and returns when they can be used.
    pub(crate) text: &'a str,
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Whether to run in a separate network namespace.
    pub(crate) own_network: bool,
    /// Folder of files and logs, which are named after `name`.
    pub(crate) folder: &'a Path,
    pub(crate) name: &'static str,
}

pub(crate) struct HelperProcess {
    child: ChildProcess,
    input: Option<ChildStdin>,
}

impl HelperProcess {
    /// Starts the process and waits until it is ready.
    pub(crate) fn start(script: &Script<'_>) -> anyhow::Result<HelperProcess> {
        let path = |extension: &str| script.folder.join(format!("{}.{extension}", script.name));
        let (text, ready, log) = (path("sh"), path("ready"), path("log"));
        fs::write(&text, script.text).with_context(|| format!("cannot write {}", text.display()))?;
        drop(fs::remove_file(&ready));
        let output = append(&log)?;
        let shell = ["bash", "-c", UNTIL_INPUT_ENDS];
        let in_namespace = ["unshare", "--net", "--"];
        let command_parts: Vec<&str> =
            if script.own_network { [&in_namespace[..], &shell].concat() } else { shell.to_vec() };
        let mut command = Command::new(command_parts[0]);
        command
            .args(&command_parts[1..])
            .env("REPRISE_SCRIPT", &text)
            .env("REPRISE_READY", &ready)
            .envs(script.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(output.try_clone().context("a second handle of a log")?)
            .stderr(output);
        let mut child = ChildProcess::try_spawn(command)?;
        let input = child.take_input();
        let mut helper = HelperProcess { child, input };
        helper.await_ready(&ready, &log)?;
        Ok(helper)
    }

    /// Returns the process id, whose network namespace it uses.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn await_ready(&mut self, ready: &Path, log: &Path) -> anyhow::Result<()> {
        let give_up = Instant::now() + READY_WITHIN;
        while !ready.exists() {
            if !self.child.is_alive() || Instant::now() > give_up {
                let log_text = read_log(log);
                bail!("it did not start; its log {}:\n{log_text}", log.display());
            }
            std::thread::sleep(READY_PAUSE);
        }
        Ok(())
    }
}

impl Drop for HelperProcess {
    fn drop(&mut self) {
        drop(self.input.take());
        self.child.wait(STOP_WITHIN);
        self.child.stop(STOP_WITHIN);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn script<'a>(folder: &'a Path, text: &'a str) -> Script<'a> {
        Script { text, variables: Vec::new(), own_network: false, folder, name: "helper" }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("reprise-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("writable");
        folder
    }

    #[test]
    fn processes_of_a_helper_end_with_it() {
        let folder = folder("helper-ends");
        let text = format!("sleep 1000 & echo $! > {}/pid", folder.display());
        let helper = HelperProcess::start(&script(&folder, &text)).expect("a shell is installed");
        let pid = fs::read_to_string(folder.join("pid")).expect("the script has written it");
        let process = PathBuf::from(format!("/proc/{}", pid.trim()));
        assert!(process.exists());
        assert!(PathBuf::from(format!("/proc/{}", helper.pid())).exists());
        drop(helper);
        assert!(!process.exists());
        fs::remove_dir_all(&folder).expect("the folder exists");
    }

    #[test]
    fn failed_script_is_reported_with_its_output() {
        let folder = folder("helper-fails");
        let result = HelperProcess::start(&script(&folder, "echo no such port >&2; false"));
        let error = result.err().expect("the script fails").to_string();
        assert!(error.contains("no such port"), "{error}");
        fs::remove_dir_all(&folder).expect("the folder exists");
    }
}
