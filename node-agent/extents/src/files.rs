//! The backend `staged`: io_uring on pool files that the agent lends.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use reprise_buffers::MappedRegion;
use reprise_client::{Client, PinnedExtent};
use reprise_cuda::store::{Backend, KvGeometry, KvMemory, KvOrder, LayerMover, StagedMover};
use reprise_io::DeviceFile;

use crate::headers::HeaderReader;
use crate::path::{Devices, ExtentDevice, ExtentPath};
use crate::rings::geometry_of;

/// Memory of this process, and files between which and the memory blocks move; see the crate.
pub type FilePath = ExtentPath<FileDevices>;

/// Pool files over one memory.
#[derive(Debug)]
pub struct FileDevices {
    geometry: KvGeometry,
    memory: KvMemory,
    /// By index of the backend.
    files: Vec<(u32, Arc<File>)>,
    mover: StagedMover,
    headers: HeaderReader,
}

impl FileDevices {
    fn open(
        geometry: KvGeometry,
        memory: KvMemory,
        files: Vec<(u32, Arc<File>)>,
    ) -> anyhow::Result<FileDevices> {
        let mover = mover_of(geometry, &memory, &files)?;
        let headers = HeaderReader::start().context("a thread for header pages")?;
        Ok(FileDevices { geometry, memory, files, mover, headers })
    }
}

fn mover_of(
    geometry: KvGeometry,
    memory: &KvMemory,
    files: &[(u32, Arc<File>)],
) -> anyhow::Result<StagedMover> {
    let lend = |(_, file): &(u32, Arc<File>)| -> anyhow::Result<DeviceFile> {
        Ok(DeviceFile::lent(file.try_clone().context("duplicating the descriptor of a pool file")?)?)
    };
    let lent = files.iter().map(lend).collect::<Result<_, _>>()?;
    Ok(StagedMover::new(geometry, memory.clone(), lent)?)
}

impl Devices for FileDevices {
    const REMEDY: &'static str =
        "the agent lends no files of its devices; set session.extents, and use files or drives of the kernel";

    fn reaches(file: Option<&Arc<File>>) -> bool {
        file.is_some()
    }

    /// Opens the backend again with files that it does not have.
    fn ensure(&mut self, devices: &[ExtentDevice], _: Instant) -> anyhow::Result<()> {
        let mut files = self.files.clone();
        for (device, file) in devices {
            let Some(file) = file else { continue };
            match files.iter_mut().find(|(known, _)| known == device) {
                // The agent uses the number for another file.
                Some((_, known)) if !Arc::ptr_eq(known, file) => *known = Arc::clone(file),
                Some(_) => {}
                None => files.push((*device, Arc::clone(file))),
            }
        }
        let is_known = |index: usize| {
            self.files.get(index).is_some_and(|(_, known)| Arc::ptr_eq(known, &files[index].1))
        };
        if !(0..files.len()).all(is_known) {
            self.mover = mover_of(self.geometry, &self.memory, &files)?;
            self.files = files;
        }
        Ok(())
    }

    fn index(&self, device: u32) -> usize {
        self.files.iter().position(|(known, _)| *known == device).expect("its file is open")
    }

    fn mover(&mut self) -> &mut dyn LayerMover {
        &mut self.mover
    }

    fn state(&self) -> &dyn LayerMover {
        &self.mover
    }

    fn read_headers(
        &mut self,
        _: (&MappedRegion, u64),
        extents: &[&PinnedExtent],
        deadline: Instant,
    ) -> anyhow::Result<Vec<Option<Vec<u8>>>> {
        let page = |extent: &&PinnedExtent| (extent.file().cloned(), extent.offset());
        Ok(self.headers.read(extents.iter().map(page).collect(), deadline))
    }

    fn settle(&mut self, ended: anyhow::Result<Vec<usize>>, _: Instant) -> anyhow::Result<Vec<usize>> {
        ended
    }

    fn is_settled(&self) -> bool {
        self.mover.given_up() == 0 && self.headers.given_up() == 0
    }

    fn is_usable(&self) -> bool {
        true
    }
}

impl FilePath {
    /// Allocates memory for `blocks` blocks, and opens lent files, by the numbers of their devices.
    ///
    /// # Errors
    /// Layers of a block are not whole pages, a file or io_uring cannot be used, or memory is short.
    pub fn open(
        client: &Client,
        blocks: usize,
        files: Vec<(u32, Arc<File>)>,
        timeout: Duration,
    ) -> anyhow::Result<FilePath> {
        let geometry = geometry_of(client, blocks, KvOrder::BlockLayerPart)?;
        let (memory, _) = MappedRegion::allocate(geometry.bytes()).context("memory of blocks")?;
        let span = memory.span(0, geometry.bytes()).context("memory of blocks")?;
        let devices = FileDevices::open(geometry, KvMemory::Host(span), files)?;
        client.use_backend(devices.mover.transfer_backend())?;
        Ok(ExtentPath::new(client, (geometry, memory), devices, timeout))
    }
}
