//! NVMe through VFIO in virtual machines: a controller of QEMU, an IOMMU, and a second device whose BAR stands for a GPU's
//! memory. It needs no device, no kernel module and no root on this machine; the processor is emulated.
//!
//! `make vm-test` downloads QEMU and a kernel, builds the programs that run in the machines (the examples `vm_guest` of
//! `reprise-nvme` and `vm_rings` of `reprise-cuda`, the agent and the control plane), and starts this. A test passes if the
//! console has its line with result 0. A missing line fails, and so does a console without its last line.
//!
//! ```text
//! main            speed │ driver, engine, refusals, rings
//!                       ├ before a power loss ─ after a power loss, with the agent
//!                       └ without interrupt remapping ─ without IOMMU
//! ```
//!
//! The comparison of speeds has this machine for itself; all other tests run next to each other.

#![allow(clippy::print_stdout, reason = "results of tests")]

mod agent;
mod cache_node;
mod image;
mod machine;
mod queues;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use reprise_testkit::process::binary;

use image::Image;
use machine::{Machine, Verdict};

/// Limit of one virtual machine: 60 s on an idle machine, ten times as long on a busy one.
const LIMIT: Duration = Duration::from_secs(600);
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

/// Last test of the main machine that measures speed.
const LAST_SPEED_TEST: &str = "TEST speed-depth-32 ";

/// What all machines are made of.
struct Lab {
    packages: PathBuf,
    image: Image,
    folder: tempfile::TempDir,
}

impl Lab {
    fn prepare() -> Result<Lab, Box<dyn std::error::Error>> {
        let help = "the program for the machine is missing: run `make vm-test`";
        let (guest, rings) = (environment("REPRISE_VM_GUEST", help)?, environment("REPRISE_VM_RINGS", help)?);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/vm/packages.sh");
        let output = Command::new(script).stderr(std::process::Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err("QEMU and the kernel for the machine are missing".into());
        }
        let packages = PathBuf::from(String::from_utf8(output.stdout)?.trim());
        let folder = tempfile::tempdir_in(packages.parent().ok_or("no folder for the machine")?)?;
        let init = concat!(env!("CARGO_MANIFEST_DIR"), "/vm/init.sh");
        let mut image = Image::new(Path::new(init))?;
        image.add_busybox(&packages)?;
        image.add_modules(&packages, &["nvme", "vfio-pci", "vfio_iommu_type1"])?;
        for (name, program) in [("vm_guest", guest), ("vm_rings", rings)] {
            image.add_program(name, &program, folder.path())?;
        }
        Ok(Lab { packages, image, folder })
    }

    /// Returns the image with the agent, and with this program, which contains its tests.
    fn image_with_agent(&self) -> io::Result<Image> {
        let mut image = self.image.clone();
        image.add_program(agent::PROGRAM, &std::env::current_exe()?, self.folder.path())?;
        for name in agent::PROGRAMS {
            image.add_program(name, &binary(name), self.folder.path())?;
        }
        println!(
            "the image has {} MiB, that with the agent {} MiB",
            self.image.bytes() >> 20,
            image.bytes() >> 20
        );
        Ok(image)
    }

    fn machine(&self, name: &'static str, processors: u8) -> Machine {
        Machine::new(name, processors, &self.packages, self.folder.path())
    }

    /// Returns the path of a file of the machines' disks, which is created if it is absent.
    fn disk(&self, name: &str, bytes: u64) -> io::Result<String> {
        let path = self.folder.path().join(name);
        std::fs::File::options().create(true).append(true).open(&path)?.set_len(bytes)?;
        Ok(path.display().to_string())
    }

    /// Adds a drive with sectors that cannot be read.
    fn faulty_drive(
        &self,
        machine: &mut Machine,
        id: &str,
        disk: &str,
        sectors: impl Iterator<Item = u64>,
    ) -> io::Result<()> {
        let rule = |sector| {
            format!(
                "[inject-error]\nevent = \"read_aio\"\niotype = \"read\"\nerrno = \"5\"\nsector = \"{sector}\"\n\
                 once = \"off\"\n"
            )
        };
        let rules = self.folder.path().join(format!("{id}.blkdebug"));
        std::fs::write(&rules, sectors.map(rule).collect::<String>())?;
        let file = format!("blkdebug:{}:{disk}", rules.display());
        machine.drive(&format!("id={id},file={file},rerror=report,werror=report"));
        Ok(())
    }

    /// One controller with two namespaces and a memory buffer, an IOMMU that remaps interrupts, and a peer.
    fn main_machine(&self) -> io::Result<Machine> {
        let mut machine = self.machine("main", 2);
        machine.device("intel-iommu,intremap=on,device-iotlb=on");
        machine.drive(&format!("id=one,file={}", self.disk("namespace1", NAMESPACE_BYTES)?));
        let second = self.disk("namespace2", NAMESPACE_BYTES)?;
        self.faulty_drive(&mut machine, "two", &second, std::iter::once(BAD_SECTOR))?;
        machine.device("nvme,id=nvme,serial=reprise-lab,max_ioqpairs=64,cmb_size_mb=16");
        machine.device("nvme-ns,drive=one,bus=nvme,nsid=1");
        machine.device("nvme-ns,drive=two,bus=nvme,nsid=2");
        machine.option("-object", "memory-backend-ram,id=memory,size=16M,share=on");
        machine.device("ivshmem-plain,memdev=memory");
        Ok(machine)
    }

    /// A controller with one namespace, which keeps its contents, and one with two namespaces for the agent.
    fn machine_with_records(&self, name: &'static str, processors: u8) -> io::Result<Machine> {
        let mut machine = self.machine(name, processors);
        machine.device("intel-iommu,intremap=on,device-iotlb=on");
        machine.drive(&format!("id=one,file={}", self.disk("records", NAMESPACE_BYTES)?));
        machine.device("nvme,serial=records,drive=one");
        machine.drive(&format!("id=good,file={}", self.disk("good", agent::NAMESPACE_BYTES)?));
        let bad = self.disk("bad", agent::NAMESPACE_BYTES)?;
        self.faulty_drive(&mut machine, "bad", &bad, agent::bad_sectors())?;
        let pairs = queues::CONTROLLER_PAIRS;
        machine.device(&format!("nvme,id=agent,serial={},max_ioqpairs={pairs}", agent::SERIAL));
        machine.device("nvme-ns,drive=good,bus=agent,nsid=1");
        machine.device("nvme-ns,drive=bad,bus=agent,nsid=2");
        Ok(machine)
    }

    /// A controller with two functions, which therefore share a group.
    fn machine_of_two_functions(&self, name: &'static str, iommu: Option<&str>) -> Machine {
        let mut machine = self.machine(name, 1);
        if let Some(iommu) = iommu {
            machine.device(iommu);
        }
        machine.device("nvme,serial=first,addr=05.0,multifunction=on");
        machine.device("nvme,serial=second,addr=05.1");
        machine
    }

    /// Runs the driver, the engine and the rings. Calls a function when the speeds are measured.
    fn run_main(&self, speeds_are_measured: impl Fn()) -> io::Result<bool> {
        let script = format!(
            "vm_guest main $1 $peer {BAD_SECTOR}\necho \"TEST guest rc=$?\"\n\
             vm_guest bind $1\nvm_rings $1 $peer {BAD_SECTOR}\n"
        );
        run(&self.main_machine()?, &self.image, &script, MAIN, |line| {
            if line.starts_with(LAST_SPEED_TEST) {
                speeds_are_measured();
            }
        })
    }

    /// Takes the power away from a machine that writes records, verifies them in the next one, and runs the agent there.
    fn run_power_loss_and_agent(&self) -> io::Result<bool> {
        let image = self.image_with_agent()?;
        match lose_power(&self.machine_with_records("before a power loss", 1)?, &self.image)? {
            Some(last) if last >= RECORDS => {
                let machine = self.machine_with_records("after a power loss", 2)?;
                let script = format!(
                    "vm_guest bind $1\nvm_guest verify $1 {RECORDS_SEED} {last} power-loss\n{}",
                    agent::script("$2")
                );
                let tests = [&["power-loss"], agent::TESTS, queues::TESTS].concat();
                run(&machine, &image, &script, &tests, |_| ())
            }
            last => {
                println!(
                    "virtual machine before a power loss: {last:?} is the last record of at least {RECORDS}"
                );
                Ok(false)
            }
        }
    }

    /// Runs machines whose controllers VFIO refuses.
    fn run_refusals(&self) -> io::Result<bool> {
        let machine =
            self.machine_of_two_functions("without interrupt remapping", Some("intel-iommu,intremap=off"));
        let script = "vm_guest bind $1\nvm_guest refused $1 'with driver nvme' shared-group\n\
                      vm_guest bind $2\nvm_guest refused $1 'does not remap interrupts' interrupt-remapping\n";
        let tests = ["shared-group", "interrupt-remapping"];
        let passed = run(&machine, &self.image, script, &tests, |_| ())?;
        let machine = self.machine_of_two_functions("without IOMMU", None);
        let script = "vm_guest bind-refused $1 'is not behind an IOMMU' no-iommu\n";
        Ok(run(&machine, &self.image, script, &["no-iommu"], |_| ())? && passed)
    }
}

/// Takes the power away from a machine that writes records; returns the number of the last one that it has reported as
/// durable.
fn lose_power(machine: &Machine, image: &Image) -> io::Result<Option<u64>> {
    let number = |line: &str| line.parse::<u64>().ok();
    let script = format!("{FIND}vm_guest bind $1\nvm_guest records $1 {RECORDS_SEED}\n");
    image.clone().with_script(&script).write(machine.initramfs())?;
    let console = machine.run(LIMIT, |line| number(line).is_some_and(|number| number >= RECORDS))?;
    Ok(console.iter().filter_map(|line| number(line)).max())
}

/// Starts a machine with a script, passes each line of its console to a function, and checks its results.
fn run(
    machine: &Machine,
    image: &Image,
    script: &str,
    tests: &[&str],
    on_line: impl Fn(&str),
) -> io::Result<bool> {
    let start = Instant::now();
    image.clone().with_script(&format!("{FIND}{script}")).write(machine.initramfs())?;
    let console = machine.run(LIMIT, |line| {
        on_line(line);
        false
    })?;
    let verdict = Verdict::of(&console, tests);
    println!("virtual machine {}: {verdict}, {:.1} s", machine.name(), start.elapsed().as_secs_f64());
    Ok(verdict.is_pass())
}

fn environment(name: &str, help: &str) -> Result<PathBuf, String> {
    std::env::var_os(name)
        .map(PathBuf::from)
        .filter(|path| path.exists())
        .ok_or_else(|| format!("{name}: {help}"))
}

fn test() -> Result<bool, Box<dyn std::error::Error>> {
    let lab = &Lab::prepare()?;
    let (sender, speeds_are_measured) = mpsc::channel();
    std::thread::scope(|scope| {
        // The sender is dropped with this thread if the machine dies before.
        let main = scope.spawn(move || {
            lab.run_main(|| {
                let _ = sender.send(());
            })
        });
        let _ = speeds_are_measured.recv();
        let others = [scope.spawn(|| lab.run_power_loss_and_agent()), scope.spawn(|| lab.run_refusals())];
        let mut passed = true;
        for machine in std::iter::once(main).chain(others) {
            passed &= machine.join().map_err(|_| "a machine's thread has panicked")??;
        }
        Ok(passed)
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [agent::ARGUMENT, controller] => return agent::run(controller),
        [queues::ENGINE, first, socket] => return queues::be_engine(first, socket),
        [queues::AS_USER, _, ..] => return queues::as_user(&arguments[1..]),
        _ => {}
    }
    match test() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("the tests in a virtual machine cannot run: {error}");
            ExitCode::FAILURE
        }
    }
}
