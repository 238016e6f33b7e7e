//! What engines run in: vLLM's environment, our wheel, and one environment for each peer. The scripts of the sources install
//! what is not there yet; all of it lies in the cache folder.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, bail, ensure};

use super::Peer;
use crate::output::Audience;

/// What an engine's process runs, in the sources.
const ENGINE_SCRIPT: &str = "bench/vllm_engine.py";

/// The folder of the sources in which everything is found.
#[derive(Clone, Debug)]
pub(super) struct Sources(PathBuf);

/// Pythons of environments, and folders of modules.
#[derive(Clone, Debug)]
pub(super) struct Environments {
    sources: Sources,
    /// vLLM's python.
    pub(super) vllm: PathBuf,
    /// Where our package lies.
    pub(super) package: PathBuf,
    peers: Vec<(Peer, Result<PathBuf, String>)>,
}

impl Sources {
    /// The Python package's folder in a checkout.
    pub(super) fn find(folder: &Path) -> anyhow::Result<Sources> {
        let folder = std::path::absolute(folder).context("no current directory")?;
        if !folder.join(ENGINE_SCRIPT).is_file() {
            bail!(
                "{} has no {ENGINE_SCRIPT}: run this in a checkout of Reprise, or name its python folder with --python",
                folder.display()
            );
        }
        Ok(Sources(folder))
    }

    /// Runs a script that prints a path, and lets people see what it says besides.
    fn path_from(&self, script: &str) -> anyhow::Result<PathBuf> {
        let output = self.run(script, &[], Stdio::inherit())?;
        ensure!(output.status.success(), "{script} has failed, for the reason above");
        printed_path(output)
    }

    /// Where a peer's python is, installed if it is not yet; or why there is none.
    fn peer_python(&self, requirements: &str) -> anyhow::Result<PathBuf> {
        let output = self.run("bench/peer-venv.sh", &[requirements], Stdio::piped())?;
        std::io::stderr().write_all(&output.stderr).context("standard error")?;
        let said = String::from_utf8_lossy(&output.stderr);
        let why = said.lines().last().unwrap_or("peer-venv.sh has failed and says nothing");
        ensure!(output.status.success(), "{why}");
        printed_path(output)
    }

    fn run(&self, script: &str, arguments: &[&str], said: Stdio) -> anyhow::Result<Output> {
        let mut command = Command::new(self.0.join(script));
        command.args(arguments).stdin(Stdio::null()).stderr(said);
        command.output().with_context(|| format!("cannot run {script}"))
    }
}

impl Environments {
    /// Installs what is not there yet. `folder` gets our package. Peers that cannot be installed are left out.
    pub(super) fn install(
        sources: Sources,
        peers: &[Peer],
        folder: &Path,
        audience: Audience,
    ) -> anyhow::Result<Environments> {
        audience.say("Environments, installed where they are not yet: vLLM's (6.4 GB) and the peers' …");
        let vllm = sources.path_from("vllm-venv.sh")?;
        let peers = peers.iter().map(|peer| (*peer, peer_environment(*peer, &sources, &vllm))).collect();
        audience.say("The wheel …");
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
            "the wheel cannot be installed: {}",
            String::from_utf8_lossy(&installed.stderr)
        );
        Ok(Environments { sources, vllm, package, peers })
    }

    /// The python that a peer's engine runs in; or why the peer is not here.
    pub(super) fn python_of(&self, peer: Peer) -> Result<&Path, &str> {
        let found = self.peers.iter().find(|(asked, _)| *asked == peer);
        found.map_or(Ok(self.vllm.as_path()), |(_, python)| python.as_deref().map_err(String::as_str))
    }

    /// What an engine's process runs.
    pub(super) fn engine_script(&self) -> PathBuf {
        self.sources.0.join(ENGINE_SCRIPT)
    }

    /// What times the scheduler's call.
    pub(super) fn scheduler_script(&self) -> PathBuf {
        self.sources.0.join("bench/scheduler_call.py")
    }

    /// Folders of modules of an engine.
    pub(super) fn modules(&self) -> Vec<PathBuf> {
        // The tests' folder has the module that writes models.
        vec![self.package.clone(), self.sources.0.join("tests")]
    }
}

/// A peer that comes with vLLM has vLLM's own.
fn peer_environment(peer: Peer, sources: &Sources, vllm: &Path) -> Result<PathBuf, String> {
    match peer.requirements() {
        Some(requirements) => sources.peer_python(requirements).map_err(|error| format!("{error:#}")),
        None => Ok(vllm.to_owned()),
    }
}

/// The last line of what a script prints.
fn printed_path(output: Output) -> anyhow::Result<PathBuf> {
    let printed = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    Ok(PathBuf::from(printed.lines().last().context("a script has printed no path")?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn without_the_sources_it_is_told_where_to_run() {
        let error = Sources::find(Path::new("/nowhere")).expect_err("it is not there").to_string();
        assert!(error.contains("--python"), "{error}");
    }

    #[test]
    fn a_peer_that_cannot_be_installed_says_why() {
        let folder = std::env::temp_dir().join(format!("reprise-peers-{}", std::process::id()));
        fs::create_dir_all(folder.join("bench")).expect("writable");
        let script = folder.join("bench/peer-venv.sh");
        let content = "#!/bin/sh\n[ $1 = lmcache ] && echo /its/python && exit\necho pip: no >&2\necho it cannot be here >&2\nexit 3\n";
        fs::write(&script, content).expect("written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let sources = Sources(folder.clone());
        let of = |peer| peer_environment(peer, &sources, Path::new("/vllm/python"));
        assert_eq!(of(Peer::Example), Ok(PathBuf::from("/vllm/python")), "it comes with vLLM");
        assert_eq!(of(Peer::Lmcache), Ok(PathBuf::from("/its/python")));
        assert_eq!(of(Peer::Mooncake), Err("it cannot be here".to_owned()));
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
