//! The interface of cuFile (`cufile.h` of CUDA 13), from a library that is loaded at run time.
//!
//! Only calls that have existed since its first version are used. The library stays loaded until the process ends: it has
//! its own threads.

use std::ffi::{OsStr, c_int, c_long, c_uint, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use libloading::Library;

use crate::ring::Operation;
use crate::store::KvMemory;
use crate::store::pool::Piece;

/// Names under which distributions and wheels install the library.
const NAMES: &[&str] = &["libcufile.so.0", "libcufile.so"];

/// Limit of the opening of the driver: it reads the topology of the machine, in less than a second for large ones.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// What to do if the library cannot be loaded.
const INSTALL: &str = "install the package libcufile of CUDA 13, or set LD_LIBRARY_PATH to its folder";

/// Kind of a descriptor that has a file descriptor: `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const HANDLE_OF_DESCRIPTOR: c_int = 1;

/// Offset of `nvfs.dstatusflags` in `CUfileDrvProps_t`, and the size of that structure.
const SUPPORTED_AT: usize = 24;
const PROPERTIES_BYTES: usize = 56;

/// Result of a call: `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    code: c_int,
    /// Result of the GPU's driver, if `code` states that it has failed.
    driver: c_int,
}

/// `CUfileDescr_t`, for a file descriptor.
#[repr(C)]
struct Descriptor {
    kind: c_int,
    handle: DescriptorHandle,
    operations: *const c_void,
}

/// The union of a file descriptor and a pointer.
#[repr(C)]
union DescriptorHandle {
    descriptor: c_int,
    _pointer: *mut c_void,
}

// As the C compiler lays them out.
const _: () = assert!(size_of::<Status>() == 8 && size_of::<Descriptor>() == 24);
const _: () = assert!(std::mem::offset_of!(Descriptor, handle) == 8);

/// Room for `CUfileDrvProps_t`, also for that of later versions.
#[repr(C, align(8))]
struct Properties([u8; 512]);

const _: () = assert!(size_of::<Properties>() > PROPERTIES_BYTES);

type Handle = *mut c_void;
type Read = unsafe extern "C" fn(Handle, *mut c_void, usize, c_long, c_long) -> isize;
type Write = unsafe extern "C" fn(Handle, *const c_void, usize, c_long, c_long) -> isize;

/// The library with its driver open.
#[derive(Debug)]
pub struct CuFile {
    handle_register: unsafe extern "C" fn(*mut Handle, *mut Descriptor) -> Status,
    handle_deregister: unsafe extern "C" fn(Handle),
    buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    buffer_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    read: Read,
    write: Write,
}

impl CuFile {
    /// Loads the library and opens its driver.
    ///
    /// # Errors
    /// A reason with the remedy: no library, a library without a function, no driver, or a driver that would copy through
    /// host memory.
    pub fn load() -> Result<Arc<CuFile>, String> {
        let mut reasons = Vec::new();
        for name in NAMES {
            // SAFETY: the initialisers of NVIDIA's library have no precondition.
            match unsafe { Library::new(*name) } {
                Ok(library) => return CuFile::open(library, OPEN_LIMIT),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(format!("cannot load libcufile ({}); {INSTALL}", reasons.join("; ")))
    }

    /// Loads the library from a path, as [`CuFile::load`] does, with a limit for the opening of its driver.
    ///
    /// # Safety
    /// The file must be a library with the interface of cuFile.
    ///
    /// # Errors
    /// As for [`CuFile::load`].
    pub unsafe fn load_from(path: impl AsRef<OsStr>, limit: Duration) -> Result<Arc<CuFile>, String> {
        // SAFETY: the caller answers for the file.
        let library = unsafe { Library::new(path.as_ref()) };
        let library = library.map_err(|error| format!("cannot load {}: {error}", path.as_ref().display()))?;
        CuFile::open(library, limit)
    }

    fn open(library: Library, limit: Duration) -> Result<Arc<CuFile>, String> {
        // Its threads and handlers stay until the process ends.
        let library: &'static Library = Box::leak(Box::new(library));
        let open: unsafe extern "C" fn() -> Status = function(library, "cuFileDriverOpen")?;
        let properties: unsafe extern "C" fn(*mut Properties) -> Status =
            function(library, "cuFileDriverGetProperties")?;
        let functions = CuFile {
            handle_register: function(library, "cuFileHandleRegister")?,
            handle_deregister: function(library, "cuFileHandleDeregister")?,
            buffer_register: function(library, "cuFileBufRegister")?,
            buffer_deregister: function(library, "cuFileBufDeregister")?,
            read: function(library, "cuFileRead")?,
            write: function(library, "cuFileWrite")?,
        };
        open_driver(open, limit)?;
        let mut found = Properties([0; 512]);
        // SAFETY: the room is larger than the structure that the function writes, and aligned as it is.
        check("cuFileDriverGetProperties", unsafe { properties(&mut found) })?;
        let word = |at: usize| c_uint::from_ne_bytes([0, 1, 2, 3].map(|byte| found.0[at + byte]));
        if word(SUPPORTED_AT) == 0 {
            return Err("cuFile supports no kind of device on this machine, and would copy through host memory \
                        (compatibility mode); load the kernel module nvidia-fs, or a kernel and driver with PCI \
                        P2PDMA, and check with gdscheck -p"
                .to_owned());
        }
        Ok(Arc::new(functions))
    }
}

/// Opens the driver. The library may never return on a machine without a GPU's driver, so a thread makes the call; after
/// the limit, the thread is left.
fn open_driver(open: unsafe extern "C" fn() -> Status, limit: Duration) -> Result<(), String> {
    let (opened, opening) = sync_channel(1);
    let thread = std::thread::Builder::new().name("cufile-open".to_owned());
    let call = move || {
        // SAFETY: no arguments; a driver that is open already is not an error.
        let status = unsafe { open() };
        // Nothing waits any longer after the limit.
        let _ = opened.send(status);
    };
    thread.spawn(call).map_err(|error| format!("cannot start a thread for cuFile: {error}"))?;
    let status = opening.recv_timeout(limit);
    let status = status.map_err(|_| {
        format!("cuFileDriverOpen has not returned within {limit:?}; check nvidia-smi and gdscheck -p")
    })?;
    check("cuFileDriverOpen", status)
}

/// Looks up a function.
fn function<F: Copy>(library: &'static Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's type is that of the function in `cufile.h`.
    let symbol = unsafe { library.get::<F>(name) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("libcufile lacks the function {name}; {INSTALL}"))
}

fn check(call: &str, status: Status) -> Result<(), String> {
    match (status.code, status.driver) {
        // 5026: the driver is open already.
        (0 | 5026, _) => Ok(()),
        (5011, driver) => {
            Err(format!("{call} failed: the GPU's driver has returned {driver}; check nvidia-smi"))
        }
        (code, _) => Err(format!("{call} failed with {}", describe(code))),
    }
}

/// Describes a status code of cuFile, with the remedy.
fn describe(code: c_int) -> String {
    let text = match code {
        5001 => "the driver nvidia-fs is not loaded: load the kernel module nvidia-fs",
        5004 | 5005 => {
            "the versions of libcufile and nvidia-fs differ: install them from the same CUDA release"
        }
        5007 => "this platform has no GPUDirect Storage: see gdscheck -p",
        5008 => "the file system of the file has no GPUDirect Storage: use ext4 or XFS on NVMe",
        5009 => "this GPU has no GPUDirect Storage",
        5016 | 5017 | 5036 => {
            "too little GPU memory can be pinned: raise max_device_pinned_mem_size_kb in cufile.json, \
                               or use a GPU with a larger BAR 1"
        }
        5018 => "the file is neither a regular file nor a block device",
        5019 | 5020 => "the file is not open for direct I/O",
        5025 => "access is denied: check the permissions of /dev/nvidia-fs* and of the file",
        5034 => "cufile.json disables GPUDirect Storage for the file",
        _ => "see cufile.log",
    };
    format!("status {code}: {text}")
}

/// Memory that is registered while this lives.
#[derive(Debug)]
pub(super) struct RegisteredRange {
    library: Arc<CuFile>,
    base: *mut c_void,
    /// Keeps the memory.
    _memory: KvMemory,
}

// SAFETY: cuFile's calls may be made from any thread; the range is only an address for it.
unsafe impl Send for RegisteredRange {}
// SAFETY: as for `Send`; the fields do not change.
unsafe impl Sync for RegisteredRange {}

impl RegisteredRange {
    pub(super) fn of(
        library: &Arc<CuFile>,
        memory: &KvMemory,
        bytes: u64,
    ) -> Result<RegisteredRange, String> {
        let base = match memory {
            KvMemory::Host(span) => span.as_mut_ptr().ok_or("KV memory is read-only")?.cast(),
            KvMemory::Gpu(memory) => {
                memory.memory.address(0, bytes).map_err(|error| error.to_string())? as *mut c_void
            }
        };
        // SAFETY: the memory has at least `bytes` bytes from `base` on, and lives as long as the registration.
        let registered = unsafe { (library.buffer_register)(base, bytes as usize, 0) };
        check("cuFileBufRegister", registered)?;
        Ok(RegisteredRange { library: Arc::clone(library), base, _memory: memory.clone() })
    }
}

impl Drop for RegisteredRange {
    fn drop(&mut self) {
        // SAFETY: the range is registered, and no transfer uses it: transfers borrow it.
        let released = unsafe { (self.library.buffer_deregister)(self.base) };
        if let Err(error) = check("cuFileBufDeregister", released) {
            tracing::warn!(error, "cannot release memory of cuFile");
        }
    }
}

/// A file that is registered while this lives.
#[derive(Debug)]
pub(super) struct RegisteredFile {
    library: Arc<CuFile>,
    handle: Handle,
    _file: File,
}

// SAFETY: cuFile's calls may be made from any thread with any handle.
unsafe impl Send for RegisteredFile {}
// SAFETY: as for `Send`; the handle does not change.
unsafe impl Sync for RegisteredFile {}

impl RegisteredFile {
    pub(super) fn of(library: &Arc<CuFile>, file: File) -> Result<RegisteredFile, String> {
        let handle = DescriptorHandle { descriptor: file.as_raw_fd() };
        let mut descriptor = Descriptor { kind: HANDLE_OF_DESCRIPTOR, handle, operations: std::ptr::null() };
        let mut handle = std::ptr::null_mut();
        // SAFETY: both point to locals of the types that the function expects; the descriptor is open, and stays so while
        // the registration lives.
        let registered = unsafe { (library.handle_register)(&mut handle, &mut descriptor) };
        check("cuFileHandleRegister", registered)?;
        Ok(RegisteredFile { library: Arc::clone(library), handle, _file: file })
    }

    /// Moves a piece, in as many calls as the library needs.
    pub(super) fn transfer(
        &self,
        operation: Operation,
        range: &RegisteredRange,
        piece: &Piece,
    ) -> Result<(), String> {
        let mut done = 0;
        while done < piece.bytes {
            let bytes = (piece.bytes - done) as usize;
            let places = (piece.on_device + done, piece.in_memory + done);
            let (on_device, in_memory) = (places.0 as c_long, places.1 as c_long);
            let moved = match operation {
                // SAFETY: the handle is registered; the caller has checked that the piece lies inside of the range.
                Operation::Read => unsafe {
                    (self.library.read)(self.handle, range.base, bytes, on_device, in_memory)
                },
                // SAFETY: as for reads.
                Operation::Write => unsafe {
                    (self.library.write)(self.handle, range.base, bytes, on_device, in_memory)
                },
            };
            match u64::try_from(moved) {
                Ok(0) => return Err(format!("cuFile ended before offset {}", piece.on_device + piece.bytes)),
                Ok(moved) => done += moved,
                Err(_) if moved == -1 => return Err(std::io::Error::last_os_error().to_string()),
                Err(_) => {
                    let code = c_int::try_from(moved.unsigned_abs()).unwrap_or(c_int::MAX);
                    return Err(format!("cuFile failed with {}", describe(code)));
                }
            }
        }
        Ok(())
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        // SAFETY: the handle is registered, and no transfer uses it: transfers borrow it.
        unsafe { (self.library.handle_deregister)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_that_is_absent_or_no_library_is_a_reason_with_the_remedy() {
        // SAFETY: no file is loaded.
        let reason =
            unsafe { CuFile::load_from("/nonexistent/libcufile.so.0", OPEN_LIMIT) }.expect_err("no file");
        assert!(reason.contains("cannot load /nonexistent/libcufile.so.0"), "{reason}");
    }

    #[test]
    fn status_codes_have_remedies() {
        let failed = |code, driver| check("cuFileDriverOpen", Status { code, driver }).expect_err("failed");
        assert!(failed(5001, 0).contains("load the kernel module nvidia-fs"));
        assert!(failed(5011, 100).contains("has returned 100"));
        assert!(failed(5099, 0).contains("status 5099: see cufile.log"));
        assert_eq!(check("cuFileDriverOpen", Status { code: 5026, driver: 0 }), Ok(()));
    }
}
