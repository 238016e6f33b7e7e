//! Opens the first backend that this machine and these means allow.

use std::fs::File;

use reprise_buffers::Span;
use reprise_io::DeviceFile;

use crate::store::{
    BackendChoice, BackendKind, CuFile, GdsMover, HostMover, KvGeometry, KvMemory, LayerMover, MoveError,
    RingDevice, RingMover, StagedMover, Unusable, choose,
};

/// What an engine has for backends. A missing part has the reason why it is missing, with the remedy.
#[derive(Debug)]
pub struct Means<'k> {
    /// Geometry of KV memory.
    pub geometry: KvGeometry,
    /// KV memory.
    pub memory: KvMemory,
    /// Rings of devices, in the order of the indices in places.
    pub rings: Result<Vec<RingDevice<'k>>, String>,
    /// Files of devices, open for direct I/O.
    pub files: Result<Vec<File>, String>,
    /// Regions of slots in host memory.
    pub slots: Result<Vec<Span>, String>,
}

/// Opens the first usable backend. Logs its name, and why each one before is not used. The engine states
/// [`transfer_backend`](crate::store::Backend::transfer_backend) to its agent.
///
/// # Errors
/// The reasons of all backends, if none can be used.
pub fn open_backend<'k>(means: Means<'k>) -> Result<BackendChoice<Box<dyn LayerMover + 'k>>, Vec<Unusable>> {
    let Means { geometry, memory, rings, files, slots } = means;
    let mut rings = Some(rings);
    let text = |error: MoveError| error.to_string();
    let choice = choose(|kind| match kind {
        BackendKind::GpuQueue => {
            let mut mover = RingMover::new(geometry);
            for device in rings.take().unwrap_or_else(|| Err("rings are taken".to_owned()))? {
                mover.attach(device);
            }
            if mover.is_empty() {
                return Err(
                    "no device has queue pairs for this engine; set session.queue_pairs of the agent"
                        .to_owned(),
                );
            }
            Ok(Box::new(mover) as Box<dyn LayerMover + 'k>)
        }
        BackendKind::Gds => {
            if !memory.is_on_gpu() {
                return Err("KV memory is not of a GPU; use an engine that runs on a GPU".to_owned());
            }
            let library = CuFile::load()?;
            Ok(Box::new(GdsMover::new(&library, geometry, &memory, copies(&files)?).map_err(text)?))
        }
        BackendKind::Staged => {
            let lent = copies(&files)?.into_iter().map(DeviceFile::lent);
            let lent: Vec<DeviceFile> = lent.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
            Ok(Box::new(StagedMover::new(geometry, memory.clone(), lent).map_err(text)?))
        }
        BackendKind::Host => {
            let KvMemory::Host(memory) = &memory else {
                return Err("KV memory is of a GPU; the backend staged copies it".to_owned());
            };
            let regions = slots.as_ref().map_err(Clone::clone)?.clone();
            Ok(Box::new(HostMover::new(geometry, memory.clone(), regions).map_err(text)?))
        }
    })?;
    tracing::info!(backend = choice.backend.name(), "backend of blocks opened");
    Ok(choice)
}

/// Returns descriptors of the same open files, for a backend that may fail.
fn copies(files: &Result<Vec<File>, String>) -> Result<Vec<File>, String> {
    let files = files.as_ref().map_err(Clone::clone)?;
    if files.is_empty() {
        return Err("no device has a file; set session.extents of the agent".to_owned());
    }
    let copy =
        |file: &File| file.try_clone().map_err(|error| format!("cannot duplicate a descriptor: {error}"));
    files.iter().map(copy).collect()
}
