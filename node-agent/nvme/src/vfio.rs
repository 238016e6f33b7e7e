//! A controller of this machine, bound to vfio-pci: its registers, and memory that its IOMMU lets it access.
//!
//! | part | contents |
//! |---|---|
//! | [`PciFunction`] | the function in sysfs: checks with remedies, change of the driver |
//! | [`VfioController`] | the backing of a driver: group, container, registers, memory |
//! | [`VfioMemory`] | memory of the host, of the controller's buffer, or of another device's BAR |
//! | `calls`, `pages` | the only unsafe code |
//!
//! Group and container interface of VFIO (type 1, version 2). A process opens a group alone: a second driver of the same
//! controller is refused by the kernel. When the process ends, the kernel resets the function and removes all mappings.
//! This holds because no other process has a descriptor of the device: engines that drive queue pairs get their memory and
//! words for doorbells only (`relay`).
//!
//! Not included: interrupts, iommufd, several controllers in one container.

mod addresses;
mod calls;
mod error;
mod function;
mod pages;

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use reprise_buffers::{Span, check_available};
use reprise_io::PciAddress;

pub use error::FunctionError;
pub use function::PciFunction;

use crate::backing::{Backing, DmaMapping, DmaMemory, check_part};
use crate::error::NvmeError;
use crate::spec::{PAGE_BYTES, offset};
use addresses::Addresses;
use pages::{Pages, SharedPages};

/// Region of the configuration space (VFIO_PCI_CONFIG_REGION_INDEX). BARs have their own numbers.
const CONFIG_REGION: u32 = 7;
/// Offset of the command register in the configuration space.
const PCI_COMMAND: u64 = 4;
/// Bits of the command register: decode memory accesses, access memory.
const MEMORY_AND_MASTER: u16 = 1 << 1 | 1 << 2;
/// Smallest useful BAR 0: properties, and doorbells of the admin queue and one I/O queue pair.
const REGISTERS_MIN: u64 = offset::DOORBELLS as u64 + 16;

/// A device, its container, and the addresses in use in its IOMMU.
struct Domain {
    function: PciFunction,
    device: File,
    container: Arc<File>,
    /// Keeps the group, and with it the container's IOMMU.
    _group: File,
    addresses: Mutex<Addresses>,
}

impl Domain {
    fn take_address(&self, bytes: u64) -> Result<u64, FunctionError> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).take(bytes)
    }

    fn release_address(&self, address: u64) {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).release(address);
    }

    /// Maps pages for the controller.
    fn share(self: &Arc<Self>, pages: Pages) -> Result<VfioMemory, NvmeError> {
        let bytes = pages.bytes();
        let address = self.take_address(bytes as u64)?;
        match SharedPages::map(&self.container, address, pages) {
            Ok(pages) => Ok(VfioMemory::of(Block { pages, domain: Arc::clone(self) })),
            Err(error) => {
                self.release_address(address);
                Err(mapping_error(error, bytes as u64).into())
            }
        }
    }
}

/// A controller that is bound to vfio-pci.
pub struct VfioController {
    registers: Pages,
    domain: Arc<Domain>,
}

impl std::fmt::Debug for VfioController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioController").field("function", &self.domain.function).finish_non_exhaustive()
    }
}

impl VfioController {
    /// Opens a controller: its group, a new container, and its registers.
    ///
    /// # Errors
    /// What keeps the function from being used, with the remedy.
    pub fn open(function: PciFunction) -> Result<VfioController, FunctionError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(FunctionError::Processor);
        }
        let group = function.check_ready()?;
        let (container, group, device) = open_files(&function, group)?;
        let bytes = region(&device, 0)?.bytes;
        if bytes < REGISTERS_MIN {
            return Err(FunctionError::SmallBar {
                address: function.address(),
                bar: 0,
                bytes,
                needed: REGISTERS_MIN,
                remedy: "the function is not a working NVMe controller",
            });
        }
        enable(&device)
            .map_err(|error| FunctionError::system(format!("enable {}", function.address()), error))?;
        let registers = map_bar(&device, 0, 0, bytes)?;
        let addresses = Mutex::new(Addresses::new());
        let container = Arc::new(container);
        let domain = Arc::new(Domain { function, device, container, _group: group, addresses });
        Ok(VfioController { registers, domain })
    }

    /// Returns the function of the controller.
    pub fn function(&self) -> &PciFunction {
        &self.domain.function
    }

    /// Maps a BAR of another function for the controller: memory of a GPU, for queues and for data. The other function
    /// keeps its driver.
    ///
    /// # Errors
    /// `SmallBar` if the BAR is absent or has less than `needed` bytes, `Disabled` if the function does not decode
    /// accesses, or the IOMMU's driver rejects the memory.
    pub fn map_peer(&self, peer: &PciFunction, bar: u8, needed: u64) -> Result<VfioMemory, NvmeError> {
        peer.class()?;
        let bytes = peer.bar_bytes(bar).unwrap_or(0);
        if bytes < needed || bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) {
            return Err(NvmeError::Function(FunctionError::SmallBar {
                address: peer.address(),
                bar,
                bytes,
                needed,
                remedy: "enable large BARs (Resizable BAR, Above 4G Decoding) in the firmware, or need less",
            }));
        }
        peer.check_enabled()?;
        let path = peer.bar_path(bar);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::PermissionDenied => FunctionError::Permission { path: path.display().to_string() },
            _ => FunctionError::system(format!("map {}", path.display()), source),
        };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let pages = Pages::of_file(&file, 0, bytes as usize).map_err(failed)?;
        self.domain.share(pages)
    }
}

impl Backing for VfioController {
    type Memory = VfioMemory;

    fn register_bytes(&self) -> usize {
        self.registers.bytes()
    }

    fn read(&self, offset: usize) -> u32 {
        self.registers.read_register(offset)
    }

    fn write(&self, offset: usize, value: u32) {
        self.registers.write_register(offset, value);
    }

    fn allocate(&self, bytes: usize) -> Result<VfioMemory, NvmeError> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        check_available(bytes as u64)?;
        let pages = Pages::allocate(bytes).map_err(|error| {
            FunctionError::system(format!("allocate {bytes} bytes for a controller"), error)
        })?;
        self.domain.share(pages)
    }

    fn map(&self, span: &Span) -> Result<DmaMapping, NvmeError> {
        let bytes = span.len() as u64;
        let page = PAGE_BYTES as u64;
        if span.is_empty() || !(span.as_ptr().addr() as u64 | bytes).is_multiple_of(page) {
            return Err(NvmeError::Invalid(format!("{bytes} bytes to map: expected whole pages")));
        }
        let address = self.domain.take_address(bytes)?;
        if let Err(error) = pages::map_span(&self.domain.container, address, span) {
            self.domain.release_address(address);
            return Err(mapping_error(error, bytes).into());
        }
        let mapped = MappedSpan { span: Some(span.clone()), address, domain: Arc::clone(&self.domain) };
        Ok(DmaMapping::new(address, bytes, Box::new(mapped)))
    }

    fn register_address(&self, offset: usize) -> Option<NonNull<u32>> {
        Some(self.registers.register_address(offset))
    }

    fn map_own_bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<VfioMemory, NvmeError> {
        let domain = &self.domain;
        let size = region(&domain.device, bar.into())?.bytes;
        let needed = offset.saturating_add(bytes);
        if size < needed {
            return Err(NvmeError::Function(FunctionError::SmallBar {
                address: domain.function.address(),
                bar,
                bytes: size,
                needed,
                remedy: "the controller reports a memory buffer that it does not have",
            }));
        }
        let pages = map_bar(&domain.device, bar.into(), offset, bytes)?;
        let address = domain.take_address(bytes)?;
        let pages = SharedPages::own_bar(address, pages);
        Ok(VfioMemory::of(Block { pages, domain: Arc::clone(domain) }))
    }
}

/// Opens container, group and device of a function, and joins them.
fn open_files(function: &PciFunction, group: u32) -> Result<(File, File, File), FunctionError> {
    let address = function.address();
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
    let failed = |what: &str, error: io::Error| FunctionError::system(format!("{what} of {address}"), error);
    let path = "/dev/vfio/vfio";
    let container = open(path).map_err(|error| open_error(error, path, address, group))?;
    let is_supported = calls::is_supported(&container);
    if !is_supported.map_err(|error| failed("query the VFIO container", error))? {
        return Err(FunctionError::NoVfio);
    }
    let path = format!("/dev/vfio/{group}");
    let group_file = open(&path).map_err(|error| open_error(error, &path, address, group))?;
    if !calls::is_viable(&group_file).map_err(|error| failed("query the IOMMU group", error))? {
        // Since the check, a function of the group has got a driver.
        function.check_group(group)?;
        return Err(FunctionError::SharedGroup { address, group, others: "functions in use".into() });
    }
    calls::join(&group_file, &container).map_err(|error| failed("use the IOMMU group", error))?;
    calls::select_type1(&container).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => FunctionError::InterruptRemapping(address),
        Some(libc::ENODEV) => FunctionError::NoVfio,
        _ => failed("use the IOMMU", error),
    })?;
    let name = CString::new(address.to_string()).expect("an address has no 0");
    let device = calls::open_device(&group_file, &name).map_err(|error| failed("open the device", error))?;
    Ok((container, group_file, device))
}

/// Ends a mapping of a span when it is dropped.
struct MappedSpan {
    span: Option<Span>,
    address: u64,
    domain: Arc<Domain>,
}

impl Drop for MappedSpan {
    fn drop(&mut self) {
        let Some(span) = self.span.take() else { return };
        match calls::unmap(&self.domain.container, self.address, span.len() as u64) {
            Ok(()) => self.domain.release_address(self.address),
            Err(error) => {
                tracing::error!(%error, "leaking {} bytes that a controller may still access", span.len());
                std::mem::forget(span);
            }
        }
    }
}

/// Explains an error of opening the container or a group.
fn open_error(error: io::Error, path: &str, address: PciAddress, group: u32) -> FunctionError {
    match error.raw_os_error() {
        Some(libc::ENOENT) => FunctionError::NoVfio,
        Some(libc::EACCES | libc::EPERM) => FunctionError::Permission { path: path.into() },
        Some(libc::EBUSY) => FunctionError::GroupBusy { address, group },
        _ => FunctionError::system(format!("open {path}"), error),
    }
}

/// Lets a device decode accesses to its BARs and access memory.
fn enable(device: &File) -> io::Result<()> {
    let at = calls::region(device, CONFIG_REGION)?.offset + PCI_COMMAND;
    let mut command = [0; 2];
    device.read_exact_at(&mut command, at)?;
    let command = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
    device.write_all_at(&command.to_le_bytes(), at)
}

fn region(device: &File, index: u32) -> Result<calls::RegionPlace, FunctionError> {
    calls::region(device, index)
        .map_err(|error| FunctionError::system(format!("query region {index} of the controller"), error))
}

/// Maps a part of a BAR of a device.
fn map_bar(device: &File, bar: u32, offset: u64, bytes: u64) -> Result<Pages, FunctionError> {
    let at = region(device, bar)?.offset + offset;
    Pages::of_file(device, at, bytes as usize)
        .map_err(|error| FunctionError::system(format!("map BAR {bar} of the controller"), error))
}

/// Mapped pages, which parts share. The pages come first: the controller loses its access before the device is closed.
struct Block {
    pages: SharedPages,
    domain: Arc<Domain>,
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.pages.end() {
            // Other memory gets the address when all others were used; see `addresses`.
            self.domain.release_address(self.pages.address());
        }
    }
}

/// Memory that a controller accesses through its IOMMU, or its own memory buffer.
pub struct VfioMemory {
    block: Arc<Block>,
    offset: usize,
    bytes: usize,
}

impl std::fmt::Debug for VfioMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VfioMemory({} bytes at {:#x})", self.bytes, self.address())
    }
}

impl VfioMemory {
    fn of(block: Block) -> VfioMemory {
        let bytes = block.pages.pages().bytes();
        VfioMemory { block: Arc::new(block), offset: 0, bytes }
    }

    fn at(&self, offset: usize, size: usize) -> usize {
        assert!(offset + size <= self.bytes, "a word at {offset} of {}", self.bytes);
        self.offset + offset
    }
}

impl DmaMemory for VfioMemory {
    fn address(&self) -> u64 {
        self.block.pages.address() + self.offset as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.block.pages.pages().word(self.at(offset, 8))
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        self.block.pages.pages().half_word(self.at(offset, 4))
    }

    fn part(&self, offset: usize, bytes: usize) -> Result<VfioMemory, NvmeError> {
        check_part(self.bytes, offset, bytes)?;
        Ok(VfioMemory { block: Arc::clone(&self.block), offset: self.offset + offset, bytes })
    }
}

/// Explains an error of a mapping in the IOMMU.
fn mapping_error(error: io::Error, bytes: u64) -> FunctionError {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => FunctionError::LockedMemory { bytes, limit: locked_memory_limit() },
        Some(libc::ENOSPC) => FunctionError::Mappings(bytes),
        Some(libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP) => FunctionError::Unmappable { bytes, error },
        _ => FunctionError::system(format!("map {bytes} bytes for the controller in the IOMMU"), error),
    }
}

/// Returns this process's limit of locked memory as the kernel reports it (proc(5), limits).
fn locked_memory_limit() -> String {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    line.and_then(|line| line.split_whitespace().next())
        .map_or("unknown".into(), |soft| format!("{soft} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_mappings_have_remedies() {
        let text = |code| mapping_error(io::Error::from_raw_os_error(code), 8192).to_string();
        for (code, remedy) in [
            (libc::ENOMEM, "ulimit -l"),
            (libc::ENOSPC, "dma_entry_limit"),
            (libc::EFAULT, "use memory of this machine"),
            (libc::EINVAL, "use memory of this machine"),
        ] {
            let text = text(code);
            assert!(text.contains(remedy) && text.contains("8192 bytes"), "{text}");
        }
    }
}
