//! Python environments of the engines: vLLM's environment, our wheel, and one environment per peer.
//!
//! Scripts of the source tree install missing packages into the cache directory.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, bail, ensure};

use super::Peer;
use reprise_testkit::output::Audience;

/// Script of an engine's process, relative to the sources.
const ENGINE_SCRIPT: &str = "bench/vllm_engine.py";

/// Folder of the Python package's sources.
#[derive(Clone, Debug)]
pub(super) struct Sources(PathBuf);

/// Python interpreters of the environments, and module folders.
#[derive(Clone, Debug)]
pub(super) struct Environments {
    sources: Sources,
    /// Python interpreter of vLLM's environment.
    pub(super) vllm: PathBuf,
    /// Folder of our installed package.
    pub(super) package: PathBuf,
    peers: Vec<(Peer, Result<PathBuf, String>)>,
}

impl Sources {
    /// Finds the Python package's folder in a checkout.
    pub(super) fn find(folder: &Path) -> anyhow::Result<Sources> {
        let folder = std::path::absolute(folder).context("no current directory")?;
        if !folder.join(ENGINE_SCRIPT).is_file() {
            bail!(
                "{ENGINE_SCRIPT} is missing in {}: run this in a checkout of Reprise, or pass its python folder with --python",
                folder.display()
            );
        }
        Ok(Sources(folder))
    }

    /// Runs a script that prints a path on standard output; its standard error stays visible.
    fn path_from(&self, script: &str) -> anyhow::Result<PathBuf> {
        let output = self.run(script, &[], Stdio::inherit())?;
        ensure!(output.status.success(), "{script} failed: see its output above");
        printed_path(output)
    }

    /// Returns a peer's Python interpreter and installs it if needed; the error is the script's last line.
    fn peer_python(&self, requirements: &str) -> anyhow::Result<PathBuf> {
        let output = self.run("bench/peer-venv.sh", &[requirements], Stdio::piped())?;
        std::io::stderr().write_all(&output.stderr).context("standard error")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let why = errors.lines().last().unwrap_or("peer-venv.sh failed without output");
        ensure!(output.status.success(), "{why}");
        printed_path(output)
    }

    fn run(&self, script: &str, arguments: &[&str], stderr: Stdio) -> anyhow::Result<Output> {
        let mut command = Command::new(self.0.join(script));
        command.args(arguments).stdin(Stdio::null()).stderr(stderr);
        command.output().with_context(|| format!("cannot run {script}"))
    }
}

impl Environments {
    /// Installs the environments that are missing, and our package into `folder`. A peer that cannot be
    /// installed is recorded with the error.
    pub(super) fn install(
        sources: Sources,
        peers: &[Peer],
        folder: &Path,
        audience: Audience,
    ) -> anyhow::Result<Environments> {
        audience.print_line("Installing missing environments: vLLM (6.4 GB) and peers …");
        let vllm = sources.path_from("vllm-venv.sh")?;
        let peers = peers.iter().map(|peer| (*peer, peer_environment(*peer, &sources, &vllm))).collect();
        audience.print_line("Building the wheel …");
        let wheel = sources.path_from("wheel.sh")?;
        let package = folder.join("package");
        if package.exists() {
            fs::remove_dir_all(&package).with_context(|| format!("cannot remove {}", package.display()))?;
        }
        let installed = Command::new(&vllm)
            .args(["-m", "pip", "-q", "install", "--no-deps", "--no-compile", "--target"])
            .args([&package, &wheel])
            .output()
            .context("cannot run pip")?;
        ensure!(
            installed.status.success(),
            "cannot install the wheel: {}",
            String::from_utf8_lossy(&installed.stderr)
        );
        Ok(Environments { sources, vllm, package, peers })
    }

    /// Returns the Python interpreter of a peer's engine, or the error of its installation.
    pub(super) fn python_of(&self, peer: Peer) -> Result<&Path, &str> {
        let found = self.peers.iter().find(|(asked, _)| *asked == peer);
        found.map_or(Ok(self.vllm.as_path()), |(_, python)| python.as_deref().map_err(String::as_str))
    }

    /// Returns the path of the engine script.
    pub(super) fn engine_script(&self) -> PathBuf {
        self.sources.0.join(ENGINE_SCRIPT)
    }

    /// Returns the path of the script that times the scheduler's calls.
    pub(super) fn scheduler_script(&self) -> PathBuf {
        self.sources.0.join("bench/scheduler_call.py")
    }

    /// Returns the module folders of an engine.
    pub(super) fn modules(&self) -> Vec<PathBuf> {
        // The tests' folder contains `engine_model`, which writes the model.
        vec![self.package.clone(), self.sources.0.join("tests")]
    }
}

/// Returns the Python interpreter of a peer; peers that come with vLLM use vLLM's.
fn peer_environment(peer: Peer, sources: &Sources, vllm: &Path) -> Result<PathBuf, String> {
    match peer.requirements() {
        Some(requirements) => sources.peer_python(requirements).map_err(|error| format!("{error:#}")),
        None => Ok(vllm.to_owned()),
    }
}

/// Returns the last line of a script's output as a path.
fn printed_path(output: Output) -> anyhow::Result<PathBuf> {
    let printed = String::from_utf8(output.stdout).context("the script printed invalid UTF-8")?;
    Ok(PathBuf::from(printed.lines().last().context("the script printed no path")?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn missing_sources_are_an_error_that_names_the_option() {
        let error = Sources::find(Path::new("/nowhere")).expect_err("the folder does not exist").to_string();
        assert!(error.contains("--python"), "{error}");
    }

    #[test]
    fn error_of_a_failed_installation_is_the_last_line_of_the_script() {
        let folder = std::env::temp_dir().join(format!("reprise-peers-{}", std::process::id()));
        fs::create_dir_all(folder.join("bench")).expect("writable");
        let script = folder.join("bench/peer-venv.sh");
        let content = "#!/bin/sh\n[ $1 = lmcache ] && echo /its/python && exit\necho pip: no >&2\necho it cannot be here >&2\nexit 3\n";
        fs::write(&script, content).expect("the script is written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("the script is ours");
        let sources = Sources(folder.clone());
        let of = |peer| peer_environment(peer, &sources, Path::new("/vllm/python"));
        assert_eq!(of(Peer::Example), Ok(PathBuf::from("/vllm/python")), "the example comes with vLLM");
        assert_eq!(of(Peer::Lmcache), Ok(PathBuf::from("/its/python")));
        assert_eq!(of(Peer::Mooncake), Err("it cannot be here".to_owned()));
        fs::remove_dir_all(&folder).expect("the folder is ours");
    }
}
