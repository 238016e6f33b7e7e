//! Errors of the GPU's driver, with a driver that is compiled for the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with a fake driver; the folder is removed at the end.
struct FakeDriver {
    folder: PathBuf,
}

impl FakeDriver {
    /// Compiles the driver with the given macros.
    fn new(name: &str, macros: &[&str]) -> FakeDriver {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-driver-{name}"));
        fs::create_dir_all(&folder).expect("a folder for the driver");
        let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
        let kernels = folder.join("kernels.o");
        let compile = |program: &str, arguments: &mut dyn FnMut(&mut Command)| {
            let mut command = Command::new(program);
            arguments(command.args(["-O2", "-fPIC", "-Wall", "-Werror"]));
            let status = command.status().expect("the compiler starts");
            assert!(status.success(), "the driver compiles");
        };
        compile("c++", &mut |command| {
            let source = tree.join("native/copy.cpp");
            command.args(["-std=c++17", "-fno-exceptions", "-c", "-o"]).arg(&kernels).arg(source);
        });
        compile("cc", &mut |command| {
            command.args(macros.iter().map(|define| format!("-D{define}")));
            command.args(["-shared", "-o"]).arg(folder.join("libcuda.so"));
            command.arg(tree.join("tests/cuda/fake_driver.c")).arg(&kernels);
        });
        FakeDriver { folder }
    }

    /// Runs `gpu-check` with the driver.
    fn run(&self, arguments: &[&str]) -> Output {
        gpu_check(&self.folder, arguments)
    }
}

impl Drop for FakeDriver {
    fn drop(&mut self) {
        // A file that is left does not affect other tests.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn gpu_check(libraries: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .env("LD_LIBRARY_PATH", libraries)
        .current_dir(libraries)
        .args(arguments)
        .output()
        .expect("gpu-check starts")
}

/// Asserts the exit code and a part of the output, and that nothing panicked.
fn assert_output(output: &Output, code: i32, part: &str) {
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(part), "{part:?} is not in: {text}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn a_machine_without_gpu_is_reported_with_its_own_exit_code() {
    let fake = FakeDriver::new("no-device", &["DEVICES=0"]);
    assert_output(&fake.run(&[]), 2, "the GPU driver finds no device");
    let report = fs::read_to_string(fake.folder.join("gpu-check.json")).expect("a report");
    assert!(report.contains("\"device\": \"none\""), "{report}");
}

#[test]
fn a_machine_without_driver_is_reported_with_the_remedy() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    fs::create_dir_all(&folder).expect("a folder");
    // All names that are tried for a driver, as files that cannot be loaded: an installed driver is not found.
    let numbers = [".1", ".9", ".10", ".11", ".12", ".13", ""].map(|number| format!("libcuda.so{number}"));
    for name in &numbers {
        fs::write(folder.join(name), "no library").expect("a file");
    }
    assert_output(
        &gpu_check(&folder, &[]),
        2,
        "no GPU driver is installed; install NVIDIA driver 580 or later",
    );
}

#[test]
fn an_old_driver_is_reported_with_its_version() {
    let fake = FakeDriver::new("old", &["DRIVER_VERSION=12020"]);
    assert_output(
        &fake.run(&[]),
        2,
        "the GPU driver supports CUDA 12.2: expected at least 13.0; install NVIDIA",
    );
}

#[test]
fn a_driver_without_a_function_is_reported_with_its_name() {
    let fake = FakeDriver::new("without-launch", &["WITHOUT_LAUNCH"]);
    assert_output(&fake.run(&["step", "kernels"]), 1, "the GPU driver lacks the function cuLaunchKernel");
}

#[test]
fn device_code_that_does_not_fit_the_gpu_or_is_absent_is_reported() {
    let fake = FakeDriver::new("other-gpu", &["OTHER_GPU"]);
    let part = if reprise_cuda::HAS_DEVICE_CODE {
        "CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available; the device code has no version"
    } else {
        "this build has no code for GPUs: build it with nvcc 13.0"
    };
    assert_output(&fake.run(&["step", "kernels"]), 1, part);
}

#[test]
fn without_green_contexts_a_bounded_grid_is_reported() {
    let fake = FakeDriver::new("no-green-contexts", &[]);
    fs::write(fake.folder.join("code"), "x").expect("a file");
    let output = fake.run(&["step", "partition", "--device-code", "code", "--sms", "4"]);
    assert_output(&output, 0, "the driver lacks cuDeviceGetDevResource");
    assert_output(&output, 0, "4 blocks ran on 4 SMs");
}

#[test]
fn a_partition_on_which_no_kernel_ran_fails() {
    let fake = FakeDriver::new("no-marks", &["WITHOUT_MARKS"]);
    fs::write(fake.folder.join("code"), "x").expect("a file");
    let output = fake.run(&["step", "partition", "--device-code", "code", "--sms", "4"]);
    assert_output(&output, 1, "a grid of 4 blocks ran on []");
}

#[test]
fn a_step_that_does_not_exist_is_an_error_of_its_own() {
    let fake = FakeDriver::new("typo", &[]);
    assert_output(
        &fake.run(&["--only", "kernels,typo"]),
        64,
        "unknown step \"typo\": expected some of kernels,",
    );
}

#[test]
fn copies_and_transfers_pass_their_arguments_to_kernels() {
    let fake = FakeDriver::new("host-kernels", &[]);
    fs::write(fake.folder.join("code"), "x").expect("a file");
    let arguments = |step| ["step", step, "--small", "--device-code", "code"];
    assert_output(&fake.run(&arguments("kernels")), 0, "6 random layouts, 5 kernels");
    assert_output(&fake.run(&arguments("transfers")), 0, "4 random transfers");
    let backends = fake.run(&arguments("backends"));
    assert_output(&backends, 0, "staged, 4 layouts");
    assert_output(&backends, 0, "gds is not used: ");
    let part = "streams of the GPU cannot wait for requests (the driver lacks cuStreamWaitValue32_v2)";
    assert_output(&fake.run(&arguments("streams")), 1, part);
}

#[test]
fn a_gpu_without_flush_and_order_of_remote_writes_refuses_order_by_streams() {
    let fake = FakeDriver::new("unordered", &["UNORDERED"]);
    fs::write(fake.folder.join("code"), "x").expect("a file");
    let output = fake.run(&["step", "streams", "--small", "--device-code", "code"]);
    assert_output(&output, 1, "it neither orders writes of other devices nor flushes them for a stream");
    assert_output(&output, 1, "wait for the ticket of a request on the CPU instead");
}
