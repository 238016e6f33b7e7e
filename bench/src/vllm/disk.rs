//! Prompts of other caches on the device: loaded while the cache's memory has none of them, and after a
//! restart of engine and store. A cache's memory is cleared once, before the first prompt, because no prompt
//! is repeated.
//!
//! The example connector's files are read through the page cache, which is cleared before each load, but not
//! after a restart, as for a restart of a process. LMCache's adapter for files bypasses it (`O_DIRECT`), like
//! Reprise's agent.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::{Advice, fadvise};

use super::BenchContext;
use super::peer_legs::{LMCACHE_HTTP_PORT, Running, found};
use super::samples::{Leg, Samples, System};

/// Time limit until everything is on the device.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// Time without growth after which the files are complete.
const WRITTEN_PAUSE: Duration = Duration::from_secs(5);

/// Interval between checks of the folder.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// Waits until everything is in the cache's files, so that nothing is written during a measurement.
pub(super) fn await_files(context: &BenchContext) -> anyhow::Result<()> {
    let files = context.peer_files();
    // Includes the warm-up. Prompts that are not written in time are reported as not found.
    let bytes = context.sizes.prompt_bytes() * (context.sizes.prompts + 1);
    let begun = Instant::now();
    let (mut there, mut grown) = (0, begun);
    while there < bytes && begun.elapsed() < WRITTEN_WITHIN && grown.elapsed() < WRITTEN_PAUSE {
        std::thread::sleep(LOOK_PAUSE);
        let now = folder_bytes(&files)?;
        if now != there {
            (there, grown) = (now, Instant::now());
        }
    }
    Ok(())
}

/// Measures loads that find nothing in memory.
pub(super) fn nvme(
    system: System,
    running: &mut Running,
    context: &BenchContext,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (context.seeds(), context.sizes);
    match system {
        System::Lmcache => empty_server(running)?,
        _ => empty_page_cache(&context.peer_files())?,
    }
    let answers = running.engine.measure(&seeds, sizes.tokens())?;
    samples.answered((system, Leg::Nvme), &seeds, &answers, found(&answers, sizes.cached_tokens));
    Ok(())
}

/// Measures loads by an engine and a store that were started after the files were written.
pub(super) fn restart(
    system: System,
    running: &mut Running,
    context: &BenchContext,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (context.seeds(), context.sizes);
    let answers = running.engine.measure(&seeds, sizes.tokens())?;
    samples.answered((system, Leg::Restart), &seeds, &answers, found(&answers, sizes.cached_tokens));
    Ok(())
}

/// Clears the memory of LMCache's server.
fn empty_server(running: &Running) -> anyhow::Result<()> {
    let pid = running.helper.as_ref().context("LMCache's server")?.pid();
    let output = Command::new("nsenter")
        .args(["--target", &pid.to_string(), "--net", "--"])
        .arg(running.python.with_file_name("lmcache"))
        .args(["kvcache", "clear", "--url", &format!("http://127.0.0.1:{LMCACHE_HTTP_PORT}")])
        .output()
        .context("cannot run lmcache")?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot clear the memory of LMCache's server: {words}");
    Ok(())
}

/// Drops the files of a folder from the kernel's page cache.
fn empty_page_cache(folder: &Path) -> anyhow::Result<()> {
    for path in files_below(folder)? {
        let file = File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // Pages that are not written yet would not be dropped.
        file.sync_all().with_context(|| format!("cannot sync {}", path.display()))?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .with_context(|| format!("cannot advise on {}", path.display()))?;
    }
    Ok(())
}

/// Returns the size of all files of a folder.
fn folder_bytes(folder: &Path) -> anyhow::Result<u64> {
    let sizes = files_below(folder)?.into_iter().map(|path| match fs::metadata(&path) {
        // A file renamed in the meantime is counted by the next check.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        metadata => {
            Ok(metadata.with_context(|| format!("cannot read the size of {}", path.display()))?.len())
        }
    });
    sizes.sum()
}

/// Returns the files of a folder and its subfolders.
fn files_below(folder: &Path) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot read {}", folder.display()))?;
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder { folders.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_in_all_folders_and_can_be_dropped_from_the_page_cache() {
        let folder = std::env::temp_dir().join(format!("reprise-peer-files-{}", std::process::id()));
        fs::create_dir_all(folder.join("in/it")).expect("writable");
        fs::write(folder.join("one"), [1; 3000]).expect("writable");
        fs::write(folder.join("in/it/two"), [2; 500]).expect("writable");
        assert_eq!(folder_bytes(&folder).expect("readable"), 3500);
        empty_page_cache(&folder).expect("the kernel accepts the advice");
        assert_eq!(fs::read(folder.join("one")).expect("the file exists"), [1; 3000]);
        fs::remove_dir_all(&folder).expect("the folder exists");
        assert!(folder_bytes(&folder).is_err());
    }
}
