//! Tests of opening a device, on simulated devices and files.

use std::io;
use std::path::PathBuf;

use reprise_agent_core::pool::{BatchId, DeviceOpKind};
use reprise_io::simulated::{Image, SimulatedDevice, SimulatedEngine, SimulatedSettings};
use reprise_policy::{Dtype, LayoutSpec, Parts, TenantId};

use super::*;

/// Opens a simulated device as a pool device: a kind that the kernel does not serve.
pub(in super::super) fn open_simulated(
    device: &SimulatedDevice,
    bytes: Option<u64>,
) -> Result<(RawDevice, DeviceContent), AgentError> {
    let device = device.open_engine().expect("the device has no other engine");
    read_content(&params(bytes), plain(Box::new(device)))
}

/// Opens any device as a pool device, completely.
pub(in super::super) fn open_block_device(
    device: Box<dyn BlockDevice>,
) -> Result<(RawDevice, DeviceContent), AgentError> {
    read_content(&params(None), plain(device))
}

fn plain(device: Box<dyn BlockDevice>) -> OpenDevice {
    OpenDevice { device, controller: None }
}

fn params(bytes: Option<u64>) -> OpenParams {
    OpenParams {
        description: PathBuf::from("simulated").into(),
        bytes,
        missing: IfMissing::Fail,
        reserve: Reserve::Default,
        lend_extents: false,
        lend_queues: false,
        engine: EngineSettings::default(),
    }
}

/// A device whose locks cannot be examined.
struct UnknownLocks(SimulatedEngine);

impl BlockDevice for UnknownLocks {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn caching(&self) -> Caching {
        self.0.caching()
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        self.0.read(offset, into)
    }

    fn sync(&mut self) -> Result<(), IoError> {
        self.0.sync()
    }

    fn preallocate(&mut self, bytes: u64, reserve: Reserve) -> Result<Preallocation, IoError> {
        self.0.preallocate(bytes, reserve)
    }

    fn erase(&mut self) -> Result<(), IoError> {
        self.0.erase()
    }

    fn erase_ends(&mut self, bytes: u64) -> Result<(), IoError> {
        self.0.erase_ends(bytes)
    }

    fn shared_file(&self) -> io::Result<Option<SharedFile>> {
        Err(io::Error::other("no locks"))
    }

    fn discard(self: Box<Self>) {
        Box::new(self.0).discard();
    }

    fn start_engine(self: Box<Self>, settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError> {
        Box::new(self.0).start_engine(settings)
    }
}

/// Leases a slot durably, and ends without returning it.
fn lease(open: &mut RawDevice, pool: &mut DevicePool) {
    let spec = LayoutSpec {
        layers: 1,
        parts: Parts::Latent,
        kv_heads: 1,
        head_dim: 4096,
        dtype: Dtype::Int8,
        tokens_per_block: 1,
        tp_rank: 0,
        tp_size: 1,
    };
    let layout = spec.validate().expect("valid");
    let page = pool.allocate(layout.slot_bytes()).expect("a new pool has room");
    let mut ops = pool.lend(BatchId(1), (TenantId::DEFAULT, layout), &[page]);
    while let Some(op) = ops.pop() {
        let result = match &op.kind {
            DeviceOpKind::WritePages { offset, bytes } => open.write_pages(*offset, bytes),
            DeviceOpKind::Sync => open.execute(Op::Sync).map_err(OpenError::from),
            other => panic!("a lease writes records only: {other:?}"),
        };
        result.unwrap_or_else(|error| panic!("{error}"));
        ops.extend(pool.done(op.token, Ok(())).0);
    }
}

#[test]
fn device_with_leased_extents_is_refused_while_their_locks_cannot_be_examined() {
    let bytes = 16 << 20;
    let device =
        SimulatedDevice::new(Image::new(bytes), SimulatedSettings::default()).expect("valid settings");
    let (mut open, _) = open_simulated(&device, None).unwrap_or_else(|error| panic!("{error}"));
    format(&mut open, bytes);
    drop(open);
    let open_unknown = || {
        let engine = device.open_engine().expect("the device has no other engine");
        read_content(&params(None), plain(Box::new(UnknownLocks(engine))))
    };
    let (mut open, found) = open_unknown().unwrap_or_else(|error| panic!("without leases: {error}"));
    let DeviceContent::Pool(mut found) = found else { panic!("the device holds a pool") };
    lease(&mut open, &mut found.pool);
    drop(open);
    let error = open_unknown().err().expect("a client may still write to the leased extent").chain();
    assert!(error.contains("whether clients still write to leased extents"), "{error}");
    assert!(error.contains("no locks"), "{error}");
    // With an answer, it is opened. No process can hold extents of a device that cannot be shared.
    let (_open, found) = open_simulated(&device, None).unwrap_or_else(|error| panic!("{error}"));
    let DeviceContent::Pool(found) = found else { panic!("the device holds a pool") };
    assert!(found.pool.earlier_leases().is_empty());
}

fn format(open: &mut RawDevice, device_bytes: u64) {
    let params = PoolParams {
        device_bytes,
        segment_bytes: 2 << 20,
        pool_uuid: [1; 16],
        device_index: 0,
        created_unix_us: 1,
    };
    open.apply(&OpenDecision::Format(params)).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn pool_on_another_device_than_a_file_is_formatted_recovered_grown_and_not_shrunk() {
    let settings = SimulatedSettings::default;
    let device = SimulatedDevice::new(Image::new(32 << 20), settings()).expect("valid settings");
    let (mut open, found) = open_simulated(&device, Some(16 << 20)).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(found, DeviceContent::Blank { device_bytes } if device_bytes == 16 << 20));
    format(&mut open, 16 << 20);
    drop(open);
    let pool = |bytes| match open_simulated(&device, bytes) {
        Ok((_, DeviceContent::Pool(pool))) => Ok(pool.recovery.grown_bytes),
        Ok((_, DeviceContent::Blank { .. })) => panic!("the device holds a pool"),
        Err(error) => Err(error.chain()),
    };
    assert_eq!(pool(Some(16 << 20)), Ok(0));
    assert!(pool(Some(8 << 20)).expect_err("a pool does not shrink").contains("does not shrink"));
    assert!(pool(Some(64 << 20)).expect_err("the device is smaller").contains("no space"));
    assert_eq!(pool(None), Ok(16 << 20), "the whole device");
    assert_eq!(pool(Some(32 << 20)), Ok(0), "it grows once");
}

/// A formatted device whose journal is not synced yet.
struct UnsyncedPool {
    pages: Vec<(u64, Vec<u8>)>,
    synced: bool,
}

impl Medium for UnsyncedPool {
    fn sync(&mut self) -> Result<(), IoError> {
        self.synced = true;
        Ok(())
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        assert!(self.synced, "reads require a previous sync");
        for (at, bytes) in &self.pages {
            let covered = (*at).max(offset)..(at + bytes.len() as u64).min(offset + into.len() as u64);
            for position in covered {
                into[(position - offset) as usize] = bytes[(position - at) as usize];
            }
        }
        Ok(())
    }
}

#[test]
fn file_is_created_only_if_allowed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pool");
    let params = |missing| OpenParams {
        description: path.clone().into(),
        bytes: Some(8 << 20),
        missing,
        reserve: Reserve::Bytes(0),
        lend_extents: false,
        lend_queues: false,
        engine: EngineSettings { queue_depth: 1, engine: EngineChoice::Plain, regions: Vec::new() },
    };
    assert!(open(&params(IfMissing::Fail)).is_err() && !path.exists(), "it must exist");
    let (_open, found) = open(&params(IfMissing::Create)).unwrap_or_else(|error| panic!("{error}"));
    assert!(
        matches!(found, DeviceContent::Blank { device_bytes } if device_bytes == 8 << 20) && path.exists()
    );
}

#[test]
fn journal_is_synced_before_it_is_read() {
    let device_bytes = 8 << 20;
    let params = PoolParams {
        device_bytes,
        segment_bytes: 2 << 20,
        pool_uuid: [1; 16],
        device_index: 0,
        created_unix_us: 1,
    };
    let pages = DevicePool::format(&params).expect("sound parameters");
    let mut medium = UnsyncedPool { pages, synced: false };
    let opened = recover(&PathBuf::from("formatted").into(), device_bytes, PoolOrigin::Existing, &mut medium);
    let recovered = opened.unwrap_or_else(|error| panic!("{error}"));
    assert!(recovered.stored.is_empty() && medium.synced);
}
