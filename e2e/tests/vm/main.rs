//! NVMe through VFIO in a virtual machine: a controller of QEMU, an IOMMU, and a second device whose BAR stands for a GPU's
//! memory. It needs no device, no kernel module and no root on this machine; the processor is emulated.
//!
//! `make vm-test` downloads QEMU and a kernel, builds the programs that run in the machine (the examples `vm_guest` of
//! `reprise-nvme` and `vm_rings` of `reprise-cuda`), and starts this. A test passes if the console has its line with result 0. A missing line fails, and so
//! does a console without its last line.

#![allow(clippy::print_stdout, reason = "results of tests")]

mod image;
mod machine;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use image::Image;
use machine::{Machine, Verdict};

/// Limit of one virtual machine: 20 s on an idle machine, ten times as long on a busy one.
const LIMIT: Duration = Duration::from_secs(400);
/// The sector of namespace 2 that cannot be read.
const BAD_SECTOR: u64 = 4096;
/// Size of each namespace.
const NAMESPACE_BYTES: u64 = 64 << 20;

/// Number of the record after which a machine loses power, and the seed of the records.
const RECORDS: u64 = 300;
const RECORDS_SEED: u64 = 7_000_000;

/// Tests of the main machine.
const MAIN: &[&str] = &[
    "refused-kernel-driver",
    "refused-exclusive",
    "refused-swap",
    "speed-measured",
    "speed-depth-1",
    "speed-depth-32",
    "bind",
    "identify",
    "transfers-prp",
    "transfers-sgl",
    "scattered-sgl",
    "depths",
    "queue-pairs",
    "abort-and-events",
    "peer-disabled",
    "peer-data",
    "peer-queues",
    "peer-bar-too-small",
    "memory-buffer",
    "media-error",
    "out-of-range",
    "memory-ends",
    "shutdown",
    "engine-registered-memory",
    "engine-other-memory",
    "engine-scattered-spans",
    "engine-random-load",
    "engine-capacity",
    "engine-read-only",
    "engine-media-error",
    "engine-dropped-in-flight",
    "refused-busy",
    "refused-locked-memory",
    "killed-while-writing",
    "seen-by-the-kernel",
    "guest",
    "rings-between-bar-and-disk",
    "rings-media-error",
    "rings-end",
];

/// Finds the controllers in order of their addresses, and the peer.
const FIND: &str = r#"
set --
for folder in /sys/bus/pci/devices/*; do
    [ "$(cat $folder/class)" != 0x010802 ] || set -- "$@" "${folder##*/}"
    [ "$(cat $folder/vendor) $(cat $folder/device)" != "0x1af4 0x1110" ] || peer=${folder##*/}
done
"#;

/// One controller with two namespaces and a memory buffer, an IOMMU that remaps interrupts, and a peer.
fn main_machine(packages: &Path, folder: &Path) -> std::io::Result<Machine> {
    for name in ["1", "2"] {
        std::fs::File::create(folder.join(format!("namespace{name}")))?.set_len(NAMESPACE_BYTES)?;
    }
    let rule = format!(
        "[inject-error]\nevent = \"read_aio\"\nerrno = \"5\"\nsector = \"{BAD_SECTOR}\"\nonce = \"off\"\n"
    );
    std::fs::write(folder.join("blkdebug"), rule)?;
    let at = |name: &str| folder.join(name).display().to_string();
    let mut machine = Machine::new(packages, folder);
    machine.device("intel-iommu,intremap=on,device-iotlb=on");
    machine.drive(&format!("id=one,file={}", at("namespace1")));
    let faulty = format!("blkdebug:{}:{}", at("blkdebug"), at("namespace2"));
    machine.drive(&format!("id=two,file={faulty},rerror=report,werror=report"));
    machine.device("nvme,id=nvme,serial=reprise-lab,max_ioqpairs=64,cmb_size_mb=16");
    machine.device("nvme-ns,drive=one,bus=nvme,nsid=1");
    machine.device("nvme-ns,drive=two,bus=nvme,nsid=2");
    machine.option("-object", "memory-backend-ram,id=memory,size=16M,share=on");
    machine.device("ivshmem-plain,memdev=memory");
    Ok(machine)
}

/// A controller with one namespace, which keeps its contents.
fn machine_of_one_controller(packages: &Path, folder: &Path) -> std::io::Result<Machine> {
    let namespace = folder.join("records");
    std::fs::File::options().create(true).append(true).open(&namespace)?.set_len(NAMESPACE_BYTES)?;
    let mut machine = Machine::new(packages, folder);
    machine.device("intel-iommu,intremap=on,device-iotlb=on");
    machine.drive(&format!("id=one,file={}", namespace.display()));
    machine.device("nvme,serial=records,drive=one");
    Ok(machine)
}

/// Takes the power away from a machine that writes records; returns the number of the last one that it has reported as
/// durable.
fn lose_power(machine: &Machine, image: &Image) -> std::io::Result<Option<u64>> {
    let number = |line: &str| line.parse::<u64>().ok();
    let script = format!("{FIND}vm_guest bind $1\nvm_guest records $1 {RECORDS_SEED}\n");
    image.clone().with_script(&script).write(machine.initramfs())?;
    let console = machine.run_until(LIMIT, |line| number(line).is_some_and(|number| number >= RECORDS))?;
    Ok(console.iter().filter_map(|line| number(line)).max())
}

/// A controller with two functions, which therefore share a group.
fn machine_of_two_functions(packages: &Path, folder: &Path, iommu: Option<&str>) -> Machine {
    let mut machine = Machine::new(packages, folder);
    if let Some(iommu) = iommu {
        machine.device(iommu);
    }
    machine.device("nvme,serial=first,addr=05.0,multifunction=on");
    machine.device("nvme,serial=second,addr=05.1");
    machine
}

/// Starts a machine with a script, and checks its results.
fn run(name: &str, machine: &Machine, image: &Image, script: &str, tests: &[&str]) -> bool {
    let start = Instant::now();
    let verdict = image.clone().with_script(&format!("{FIND}{script}")).write(machine.initramfs());
    let verdict = verdict.and_then(|()| machine.run(LIMIT)).map(|console| Verdict::of(&console, tests));
    let seconds = start.elapsed().as_secs_f64();
    match verdict {
        Ok(verdict) => {
            println!("virtual machine {name}: {verdict}, {seconds:.1} s");
            verdict.is_pass()
        }
        Err(error) => {
            println!("virtual machine {name}: {error}");
            false
        }
    }
}

fn environment(name: &str, help: &str) -> Result<PathBuf, String> {
    std::env::var_os(name)
        .map(PathBuf::from)
        .filter(|path| path.exists())
        .ok_or_else(|| format!("{name}: {help}"))
}

fn test() -> Result<bool, Box<dyn std::error::Error>> {
    let guest =
        environment("REPRISE_VM_GUEST", "the program for the machine is missing: run `make vm-test`")?;
    let rings =
        environment("REPRISE_VM_RINGS", "the program for the machine is missing: run `make vm-test`")?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/vm/packages.sh");
    let output = Command::new(script).stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err("QEMU and the kernel for the machine are missing".into());
    }
    let packages = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    let init = concat!(env!("CARGO_MANIFEST_DIR"), "/vm/init.sh");
    let mut image = Image::new(Path::new(init))?;
    image.add_busybox(&packages)?;
    image.add_modules(&packages, &["nvme", "vfio-pci", "vfio_iommu_type1"])?;
    image.add_program(&guest)?;
    image.add_program(&rings)?;
    let folder = tempfile::tempdir_in(packages.parent().ok_or("no folder for the machine")?)?;
    let folder = folder.path();

    let machine = main_machine(&packages, folder)?;
    let script = format!(
        "vm_guest main $1 $peer {BAD_SECTOR}\necho \"TEST guest rc=$?\"\n\
         vm_guest bind $1\nvm_rings $1 $peer {BAD_SECTOR}\n"
    );
    let mut passed = run("main", &machine, &image, &script, MAIN);

    let machine = machine_of_one_controller(&packages, folder)?;
    match lose_power(&machine, &image)? {
        Some(last) if last >= RECORDS => {
            let script = format!("vm_guest bind $1\nvm_guest verify $1 {RECORDS_SEED} {last} power-loss\n");
            passed &= run("after a power loss", &machine, &image, &script, &["power-loss"]);
        }
        last => {
            println!(
                "virtual machine before a power loss: {last:?} is the last record of at least {RECORDS}"
            );
            passed = false;
        }
    }

    let machine = machine_of_two_functions(&packages, folder, Some("intel-iommu,intremap=off"));
    let script = "vm_guest bind $1\nvm_guest refused $1 'with driver nvme' shared-group\n\
                  vm_guest bind $2\nvm_guest refused $1 'does not remap interrupts' interrupt-remapping\n";
    passed &= run(
        "without interrupt remapping",
        &machine,
        &image,
        script,
        &["shared-group", "interrupt-remapping"],
    );

    let machine = machine_of_two_functions(&packages, folder, None);
    let script = "vm_guest bind-refused $1 'is not behind an IOMMU' no-iommu\n";
    passed &= run("without IOMMU", &machine, &image, script, &["no-iommu"]);
    Ok(passed)
}

fn main() -> ExitCode {
    match test() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("the tests in a virtual machine cannot run: {error}");
            ExitCode::FAILURE
        }
    }
}
