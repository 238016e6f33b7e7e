//! What the driver refuses, with the remedy in the error.

use std::fs::OpenOptions;
use std::os::unix::fs::{OpenOptionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::Command;

use reprise_nvme::Backing;
use reprise_nvme::vfio::{PciFunction, VfioController};

use crate::driver::lab_device;
use crate::{Outcome, ensure, test};

/// Number of a user without privileges.
const ORDINARY_USER: u32 = 65_534;
/// More than an ordinary user may lock: 8 MiB by default.
const MANY_BYTES: usize = 64 << 20;

/// Opening the controller fails with a text.
pub(crate) fn refused(function: &PciFunction, text: &str) -> Outcome {
    match VfioController::open(function.clone()) {
        Ok(_) => Err("it was opened".into()),
        Err(error) => {
            println!("refused: {error}");
            ensure(error.to_string().contains(text), error.to_string())
        }
    }
}

/// Giving the controller to vfio-pci fails with a text, and the kernel's driver keeps it.
pub(crate) fn not_bound(function: &PciFunction, text: &str) -> Outcome {
    let error = function.bind_to_vfio().expect_err("it is in use").to_string();
    println!("refused: {error}");
    ensure(error.contains(text) && function.driver().as_deref() == Some("nvme"), error)
}

fn shell(program: &str, arguments: &[&std::ffi::OsStr]) -> Outcome {
    let status = Command::new(program).args(arguments).status()?;
    ensure(status.success(), format!("{program}: {status}"))
}

pub(crate) fn while_the_kernel_has_it(function: &PciFunction) -> bool {
    let mut passed = test("refused-kernel-driver", || refused(function, "the kernel's driver nvme: bind it"));
    passed &= test("refused-exclusive", || {
        let device = lab_device(function)?;
        let held = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device)?;
        not_bound(function, "is in use by a mount in another namespace, or a process")?;
        drop(held);
        Ok(())
    });
    passed
        & test("refused-swap", || {
            let device = lab_device(function)?;
            shell("mkswap", &[device.as_os_str()])?;
            shell("swapon", &[device.as_os_str()])?;
            let result = not_bound(function, "is in use by swap");
            shell("swapoff", &[device.as_os_str()])?;
            result
        })
}

pub(crate) fn with_vfio(function: &PciFunction) -> bool {
    let passed = test("refused-busy", || {
        let first = VfioController::open(function.clone())?;
        let result = refused(function, "is open in another process");
        drop(first);
        VfioController::open(function.clone())?;
        result
    });
    passed
        & test("refused-locked-memory", || {
            for path in ["/dev/vfio/vfio".into(), format!("/dev/vfio/{}", function.iommu_group()?)] {
                chown(path, Some(ORDINARY_USER), None)?;
            }
            let program = std::env::current_exe()?;
            let mut command = Command::new(program);
            command
                .args(["locked-memory", &function.address().to_string()])
                .uid(ORDINARY_USER)
                .gid(ORDINARY_USER);
            let status = command.status()?;
            ensure(status.success(), format!("as another user: {status}"))
        })
}

/// As an ordinary user: a small allocation succeeds, a large one fails with the limit.
pub(crate) fn locked_memory(function: &PciFunction) -> Outcome<bool> {
    let controller = VfioController::open(function.clone())?;
    controller.allocate(1 << 20)?;
    let error = controller.allocate(MANY_BYTES).expect_err("more than the limit").to_string();
    println!("refused: {error}");
    Ok(error.contains("LimitMEMLOCK=") && error.contains(&MANY_BYTES.to_string()))
}
