//! Prompts of other caches that lie on the device: loaded while the cache's memory has none of them, and after engine and store
//! were started anew. A cache's memory is emptied once, before the first of them: none of them is asked for twice.
//!
//! The example connector's files are read through the page cache, which is emptied before each load; after a restart it is not, as
//! after one of a process. LMCache's adapter for files goes past it (`O_DIRECT`), as our own agent does.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::{Advice, fadvise};

use super::World;
use super::peers::{LMCACHE_HTTP_PORT, Running, found};
use super::samples::{Leg, Samples, System};

/// How long everything may take until it is on the device.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// Nothing more comes when nothing has come for so long.
const WRITTEN_PAUSE: Duration = Duration::from_secs(5);

/// Between two looks at the folder.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// Waits until everything is in the cache's files, so that nothing is written while something is measured.
pub(super) fn written(world: &World) -> anyhow::Result<()> {
    let files = world.peer_files();
    // The warm-up is there, too. What is not there in time is missed, and told as not found.
    let bytes = world.sizes.prompt_bytes() * (world.sizes.prompts + 1);
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

/// Loads that find nothing in memory.
pub(super) fn nvme(
    system: System,
    running: &mut Running,
    world: &World,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (world.seeds(), world.sizes);
    match system {
        System::Lmcache => empty_server(running)?,
        _ => empty_page_cache(&world.peer_files())?,
    }
    let answers = running.engine.measure(&seeds, sizes.tokens())?;
    samples.answered((system, Leg::Nvme), &seeds, &answers, found(&answers, sizes.cached_tokens));
    Ok(())
}

/// Loads by an engine and a store that were started after the files were written.
pub(super) fn restart(
    system: System,
    running: &mut Running,
    world: &World,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (world.seeds(), world.sizes);
    let answers = running.engine.measure(&seeds, sizes.tokens())?;
    samples.answered((system, Leg::Restart), &seeds, &answers, found(&answers, sizes.cached_tokens));
    Ok(())
}

/// Has LMCache's server forget what it has in memory.
fn empty_server(running: &Running) -> anyhow::Result<()> {
    let pid = running.companion.as_ref().context("LMCache's server")?.pid();
    let output = Command::new("nsenter")
        .args(["--target", &pid.to_string(), "--net", "--"])
        .arg(running.python.with_file_name("lmcache"))
        .args(["kvcache", "clear", "--url", &format!("http://127.0.0.1:{LMCACHE_HTTP_PORT}")])
        .output()
        .context("cannot run lmcache")?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "LMCache's server does not clear its memory: {words}");
    Ok(())
}

/// Has the kernel forget what it has of files.
fn empty_page_cache(folder: &Path) -> anyhow::Result<()> {
    for path in files_below(folder)? {
        let file = File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // Pages that are not written yet would stay.
        file.sync_all().with_context(|| format!("cannot sync {}", path.display()))?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .with_context(|| format!("cannot advise on {}", path.display()))?;
    }
    Ok(())
}

/// Of all files.
fn folder_bytes(folder: &Path) -> anyhow::Result<u64> {
    let sizes = files_below(folder)?.into_iter().map(|path| match fs::metadata(&path) {
        // One that was given its name meanwhile is counted by the next look.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        metadata => Ok(metadata.with_context(|| format!("cannot look at {}", path.display()))?.len()),
    });
    sizes.sum()
}

/// Files of a folder and of those in it.
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
        empty_page_cache(&folder).expect("an advice is always taken");
        assert_eq!(fs::read(folder.join("one")).expect("it is there"), [1; 3000]);
        fs::remove_dir_all(&folder).expect("it is ours");
        assert!(folder_bytes(&folder).is_err());
    }
}
