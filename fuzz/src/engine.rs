//! libFuzzer as the source of inputs, and a bound on the memory that an input allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, panic, process, ptr, slice};

/// Arguments of libFuzzer, one in each line; the first is the folder of inputs. `make fuzz` sets it.
const ARGUMENTS: &str = "REPRISE_FUZZ_ARGUMENTS";

/// Maximum number of bytes that an input may have allocated at once: four frames of the session protocol.
const ALLOCATED_BYTES_MAX: usize = 64 << 20;

/// The function that runs on each input.
type Target = Box<dyn Fn(&[u8])>;

thread_local! {
    /// The target that runs on this thread.
    static TARGET: RefCell<Option<Target>> = const { RefCell::new(None) };
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded { allocated: AtomicUsize::new(0), max: AtomicUsize::new(usize::MAX) };

unsafe extern "C" {
    /// `FuzzerInterface.h` of LLVM: parses the arguments, runs the callback on inputs, and exits at the end.
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        arguments: *mut *mut *mut c_char,
        callback: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
}

/// The system's allocator with a bound on all allocated bytes.
struct Bounded {
    allocated: AtomicUsize,
    max: AtomicUsize,
}

/// Returns the arguments of libFuzzer, if it generates the inputs.
pub(super) fn arguments() -> Option<Vec<String>> {
    Some(std::env::var(ARGUMENTS).ok()?.lines().map(str::to_owned).collect())
}

/// Runs a target until a limit of the arguments is reached, or until an input fails.
pub(super) fn run(arguments: &[String], seeds: &[Vec<u8>], run: impl Fn(&[u8]) + 'static) {
    let folder = Path::new(arguments.first().expect("the folder of inputs"));
    for (number, seed) in seeds.iter().enumerate() {
        fs::write(folder.join(format!("seed-{number}")), seed).expect("inputs can be written");
    }
    TARGET.set(Some(Box::new(run)));
    // libFuzzer writes the input when the process aborts. A panic that the target catches counts, too: the agent aborts.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |information| {
        report(information);
        process::abort();
    }));
    let texts = ["fuzz"].into_iter().chain(arguments.iter().map(String::as_str));
    let texts: Vec<CString> = texts.map(|text| CString::new(text).expect("no zero bytes")).collect();
    let mut pointers: Vec<*mut c_char> = texts.iter().map(|text| text.as_ptr().cast_mut()).collect();
    let mut count = c_int::try_from(pointers.len()).expect("a few arguments");
    pointers.push(ptr::null_mut());
    let mut pointers = pointers.as_mut_ptr();
    // SAFETY: `count` and `pointers` are the arguments of a `main` in C: that many strings that end with zero, and a null
    // pointer behind them. They outlive the call. libFuzzer replaces the pointer, and does not write to the strings.
    let code = unsafe { LLVMFuzzerRunDriver(&raw mut count, &raw mut pointers, one_input) };
    process::exit(code);
}

/// Runs the target of this thread on an input.
extern "C" fn one_input(data: *const u8, bytes: usize) -> c_int {
    // SAFETY: libFuzzer passes that many readable bytes, which do not change during the call; a pointer for none.
    let input = if bytes == 0 { &[] } else { unsafe { slice::from_raw_parts(data, bytes) } };
    ALLOCATOR.begin();
    TARGET.with_borrow(|target| target.as_ref().expect("set before the run")(input));
    ALLOCATOR.end();
    0
}

impl Bounded {
    fn begin(&self) {
        self.max.store(self.allocated.load(Ordering::Relaxed) + ALLOCATED_BYTES_MAX, Ordering::Relaxed);
    }

    fn end(&self) {
        self.max.store(usize::MAX, Ordering::Relaxed);
    }

    /// Counts bytes before their allocation. Aborts if there are too many.
    fn add(&self, bytes: usize) {
        let all = self.allocated.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if all > self.max.load(Ordering::Relaxed) {
            self.end();
            // Not a panic: it would allocate.
            let _ = writeln!(std::io::stderr(), "the input allocates more than {ALLOCATED_BYTES_MAX} bytes");
            process::abort();
        }
    }
}

// SAFETY: all calls are passed to the system's allocator unchanged (GlobalAlloc, "Safety"); counting allocates nothing.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.allocated.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above, and the pointer is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }
}
