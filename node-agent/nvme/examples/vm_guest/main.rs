//! Tests of the driver on a real controller through VFIO, inside the virtual machine of `e2e/vm`. Each prints
//! `TEST NAME rc=N`, 0 for a pass.
//!
//! ```text
//! vm_guest main CONTROLLER PEER BAD_BLOCK    all tests on a controller that the kernel's driver has
//! vm_guest refused CONTROLLER TEXT NAME      opening fails with an error that contains TEXT
//! vm_guest bind-refused CONTROLLER TEXT NAME the same for giving it to vfio-pci
//! vm_guest bind CONTROLLER                   gives the controller to vfio-pci
//! vm_guest locked-memory CONTROLLER          maps more memory than an ordinary user may lock
//! vm_guest records CONTROLLER SEED           writes records until it is killed
//! ```

#![allow(clippy::print_stdout, reason = "the console is the result")]

mod driver;
mod engine;
mod kill;
mod lab;
mod refusals;
mod speed;

use std::error::Error;
use std::process::ExitCode;

use reprise_io::PciAddress;
use reprise_nvme::vfio::PciFunction;

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Runs one test, and prints its result.
pub(crate) fn test(name: &str, body: impl FnOnce() -> Outcome) -> bool {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    let failure = match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("panic".into()),
    };
    if let Some(text) = &failure {
        println!("{name}: {text}");
    }
    println!("TEST {name} rc={}", u8::from(failure.is_some()));
    failure.is_none()
}

/// Returns an error with a text unless a condition holds.
pub(crate) fn ensure(condition: bool, text: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(text.into().into()) }
}

fn function(address: &str) -> Outcome<PciFunction> {
    Ok(PciFunction::new(address.parse::<PciAddress>()?))
}

fn run(arguments: &[&str]) -> Outcome<bool> {
    Ok(match arguments {
        ["main", controller, peer, bad] => {
            let (controller, peer, bad) = (function(controller)?, function(peer)?, bad.parse()?);
            let mut passed = refusals::while_the_kernel_has_it(&controller);
            passed &= speed::run(&controller);
            passed &= test("bind", || Ok(controller.bind_to_vfio()?));
            passed &= driver::run(&controller, &peer, bad);
            passed &= engine::run(&controller, bad);
            passed &= refusals::with_vfio(&controller);
            passed &= kill::run(&controller);
            passed & driver::seen_by_the_kernel(&controller)
        }
        ["refused", controller, text, name] => {
            let controller = function(controller)?;
            test(name, || refusals::refused(&controller, text))
        }
        ["bind-refused", controller, text, name] => {
            let controller = function(controller)?;
            test(name, || refusals::not_bound(&controller, text))
        }
        ["bind", controller] => {
            function(controller)?.bind_to_vfio()?;
            true
        }
        ["locked-memory", controller] => refusals::locked_memory(&function(controller)?)?,
        ["records", controller, seed] => kill::write_records(&function(controller)?, seed.parse()?)?,
        _ => return Err("unknown arguments: see the start of the source".into()),
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("{}: {error}", arguments.join(" "));
            ExitCode::from(2)
        }
    }
}
