//! A virtual machine of QEMU, whose serial console has the results.

use std::fmt;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// A machine to start.
#[derive(Debug)]
pub(crate) struct Machine {
    name: &'static str,
    packages: PathBuf,
    initramfs: PathBuf,
    options: Vec<String>,
}

impl Machine {
    /// Creates a machine with a name, which starts the lines of its console, and a number of processors.
    pub(crate) fn new(name: &'static str, processors: u8, packages: &Path, folder: &Path) -> Machine {
        let initramfs = folder.join(format!("{name}.initramfs"));
        let options = vec!["-smp".to_owned(), processors.to_string()];
        Machine { name, packages: packages.to_owned(), initramfs, options }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn option(&mut self, name: &str, value: &str) {
        self.options.extend([name.to_owned(), value.to_owned()]);
    }

    pub(crate) fn device(&mut self, value: &str) {
        self.option("-device", value);
    }

    pub(crate) fn drive(&mut self, value: &str) {
        self.option("-drive", &format!("if=none,format=raw,{value}"));
    }

    /// Path of the file that becomes the initial file system.
    pub(crate) fn initramfs(&self) -> &Path {
        &self.initramfs
    }

    /// Starts the machine and reads its console until it is powered off, at most for a limit. Takes the power away after
    /// a line that `is_last` selects.
    pub(crate) fn run(&self, limit: Duration, is_last: impl Fn(&str) -> bool) -> io::Result<Vec<String>> {
        let mut qemu = self.command()?.stdout(Stdio::piped()).stdin(Stdio::null()).spawn()?;
        let console = BufReader::new(qemu.stdout.take().expect("piped"));
        let (sender, receiver) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in console.split(b'\n') {
                let Ok(line) = line else { break };
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let (end, mut lines) = (Instant::now() + limit, Vec::new());
        loop {
            match receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    println!("  {}: {line}", self.name);
                    let ends = is_last(&line);
                    lines.push(line);
                    if ends {
                        qemu.kill()?;
                        break;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    println!("virtual machine {}: not ended within {limit:?}", self.name);
                    qemu.kill()?;
                    break;
                }
            }
        }
        qemu.wait()?;
        let _ = reader.join();
        Ok(lines)
    }

    fn command(&self) -> io::Result<Command> {
        let packages = &self.packages;
        let boot = std::fs::read_dir(packages.join("boot"))?;
        let kernel = boot.filter_map(Result::ok).map(|entry| entry.path());
        let kernel = kernel.filter(|path| path.display().to_string().contains("vmlinuz")).max();
        let kernel =
            kernel.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the packages have no kernel"))?;
        let loader = ["lib64", "usr/lib64"].map(|folder| packages.join(folder).join("ld-linux-x86-64.so.2"));
        let loader = loader.iter().find(|path| path.exists());
        let loader =
            loader.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the packages have no loader"))?;
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        let libraries = libraries.map(|folder| packages.join(folder).display().to_string()).join(":");
        // QEMU runs with the loader and the libraries of its packages, and finds its modules and firmware there.
        let mut command = Command::new(loader);
        command.env("QEMU_MODULE_DIR", packages.join("usr/lib/x86_64-linux-gnu/qemu"));
        command.arg("--library-path").arg(libraries).arg(packages.join("usr/bin/qemu-system-x86_64"));
        for folder in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(packages.join(folder));
        }
        command.args("-accel tcg,thread=multi -machine q35 -cpu max -m 768".split(' '));
        let console = "-nic none -display none -monitor none -no-reboot -serial stdio";
        command.args(console.split(' '));
        command.args(&self.options).arg("-kernel").arg(kernel).arg("-initrd").arg(&self.initramfs);
        // On a busy machine, the kernel's check of the emulated timer at its start can fail.
        command.args(["-append", "console=ttyS0 panic=-1 quiet no_timer_check intel_iommu=on"]);
        Ok(command)
    }
}

/// What a console shows of the tests.
#[derive(Debug)]
pub(crate) struct Verdict {
    passed: usize,
    failed: Vec<String>,
    missing: Vec<String>,
    has_ended: bool,
}

impl Verdict {
    pub(crate) fn of(console: &[String], tests: &[&str]) -> Verdict {
        let results: Vec<(&str, &str)> =
            console.iter().filter_map(|line| line.strip_prefix("TEST ")?.split_once(" rc=")).collect();
        let mut verdict = Verdict {
            passed: 0,
            failed: Vec::new(),
            missing: Vec::new(),
            has_ended: console.iter().any(|line| line.starts_with("END ")),
        };
        for test in tests {
            match results.iter().find(|(name, _)| name == test) {
                Some((_, "0")) => verdict.passed += 1,
                Some(_) => {}
                None => verdict.missing.push((*test).to_owned()),
            }
        }
        // Also a result that is not in the list.
        let failed = results.iter().filter(|(_, code)| *code != "0");
        verdict.failed.extend(failed.map(|(name, _)| (*name).to_owned()));
        verdict
    }

    pub(crate) fn is_pass(&self) -> bool {
        self.failed.is_empty() && self.missing.is_empty() && self.has_ended
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tests passed", self.passed)?;
        if !self.failed.is_empty() {
            write!(f, ", failed: {}", self.failed.join(" "))?;
        }
        if !self.missing.is_empty() {
            write!(f, ", without a result: {}", self.missing.join(" "))?;
        }
        if !self.has_ended {
            write!(f, ", the machine died before its end")?;
        }
        Ok(())
    }
}
