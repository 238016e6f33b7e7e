//! What engines run in: vLLM's environment, our wheel, and one environment for each peer. The scripts of the sources install
//! what is not there yet; all of it lies in the cache folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
    peers: Vec<(Peer, PathBuf)>,
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

    /// Runs a script that prints a path.
    fn path_from(&self, script: &str, arguments: &[&str]) -> anyhow::Result<PathBuf> {
        let output = Command::new(self.0.join(script))
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot run {script}"))?;
        ensure!(output.status.success(), "{script} has failed, for the reason above");
        let said = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
        Ok(PathBuf::from(said.lines().last().context("a script has printed no path")?))
    }
}

impl Environments {
    /// Installs what is not there yet. `folder` gets our package.
    pub(super) fn install(
        sources: Sources,
        peers: &[Peer],
        folder: &Path,
        audience: Audience,
    ) -> anyhow::Result<Environments> {
        audience.say("Environments, installed where they are not yet: vLLM's (6.4 GB) and the peers' …");
        let vllm = sources.path_from("vllm-venv.sh", &[])?;
        let peers = peers
            .iter()
            .map(|peer| Ok((*peer, peer_environment(*peer, &sources, &vllm)?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        audience.say("The wheel …");
        let wheel = sources.path_from("wheel.sh", &[])?;
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

    /// The python that a peer's engine runs in.
    pub(super) fn python_of(&self, peer: Peer) -> &Path {
        let found = self.peers.iter().find(|(installed, _)| *installed == peer);
        found.map_or(self.vllm.as_path(), |(_, python)| python)
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
fn peer_environment(peer: Peer, sources: &Sources, vllm: &Path) -> anyhow::Result<PathBuf> {
    match peer.requirements() {
        Some(requirements) => sources.path_from("bench/peer-venv.sh", &[requirements]),
        None => Ok(vllm.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_sources_it_is_told_where_to_run() {
        let error = Sources::find(Path::new("/nowhere")).expect_err("it is not there").to_string();
        assert!(error.contains("--python"), "{error}");
    }
}
