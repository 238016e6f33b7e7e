//! Where processes of a test run: on loopback, or each on its own host in a virtual network.
//!
//! A [`Network`] is a bridge in a network namespace of the test's own process. Each host is a namespace that
//! a pair of virtual interfaces connects to the bridge. Blackhole routes cut two hosts off from each other:
//! packets vanish and connections stay open, as when a switch loses a path. A host whose link is down reaches
//! no other host. The machine's network is not touched. The network ends with its handle, or else with the
//! test's process.

use std::env;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use reprise_testkit::etcd;

use crate::process::LaunchOptions;
use crate::seed::print_line;

/// Set in a test's executable that runs in its own namespaces.
const INSIDE: &str = "REPRISE_E2E_NAMESPACE";

/// Set to 1, tests that need namespaces are skipped where they cannot be created.
const WITHOUT: &str = "REPRISE_WITHOUT_NAMESPACES";

/// Process id, as the machine sees it, of the process whose namespaces the program runs in.
const OUTSIDE: &str = "REPRISE_E2E_OUTSIDE";

/// Address of the bridge, under which the test's own namespace is on the network.
const HUB: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// Arguments of `unshare` for the namespaces of a program, which end with it.
const NAMESPACES: [&str; 6] = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"];

/// Performs every privileged operation that a network needs.
const PROBE: &str = "mount -t tmpfs none /run && ip netns add probe && ip netns exec probe true && ip link add hub type \
                     bridge && ip link add name far type veth peer name near && ip link set near netns probe";

/// The missing permissions, and the remedy.
const REMEDY: &str = "this user cannot create network namespaces on this machine. Install `unshare` (util-linux) and `ip` (iproute2), and run \
                      the tests as root or allow user namespaces (sysctl user.max_user_namespaces, and \
                      kernel.apparmor_restrict_unprivileged_userns=0 where that exists), bridges and veth pairs in them; or set \
                      REPRISE_WITHOUT_NAMESPACES=1 to skip the tests of partitions between hosts";

/// Host on which a process runs, with its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    address: Ipv4Addr,
    /// Its network namespace; `None`: the test's own.
    namespace: Option<String>,
}

/// A network of hosts that reach each other unless a test cuts them off.
#[derive(Debug)]
pub struct Network {
    hosts: u8,
}

impl Host {
    /// The test's own namespace, with the loopback address.
    pub const LOOPBACK: Host = Host { address: Ipv4Addr::LOCALHOST, namespace: None };

    /// Returns the host's address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns whether processes need certificates: other hosts than loopback have no plain connections.
    pub fn needs_certificates(&self) -> bool {
        !self.address.is_loopback()
    }

    /// Returns the same launch options, for a process on this host.
    pub fn launch(&self, mut options: LaunchOptions) -> LaunchOptions {
        if let Some(namespace) = &self.namespace {
            // `ip netns exec` executes the command in its own process, so process id and exit status are the
            // command's.
            let enter = ["ip", "netns", "exec", namespace].map(str::to_owned);
            options.launcher.splice(..0, enter);
        }
        options
    }

    /// Returns the file of the host's network namespace.
    ///
    /// # Panics
    /// If this is not a host of a network.
    pub fn namespace(&self) -> PathBuf {
        Path::new("/run/netns").join(self.name())
    }

    fn name(&self) -> &str {
        self.namespace.as_deref().expect("a host of a network")
    }

    /// Returns the name of the interface at the bridge.
    fn cable(&self) -> String {
        self.name().replace("host", "far")
    }
}

/// Runs the calling test again in its own namespaces. Returns `true` inside of them. Returns `false` in the
/// original process, after the test has passed there or was skipped because `REPRISE_WITHOUT_NAMESPACES=1` is
/// set.
///
/// # Panics
/// If the test fails or has another name, or if it can neither run on this machine nor be skipped.
pub fn run_in_own_namespace(test: &str) -> bool {
    // The main thread runs a test if there is one thread only.
    let running = std::thread::current().name().map(str::to_owned);
    assert!(
        running.as_deref().is_none_or(|name| name == test || name == "main"),
        "{running:?} is not {test}"
    );
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let as_root = Command::new("unshare");
    let mut as_user = Command::new("unshare");
    as_user.args(["--user", "--map-root-user"]);
    let works = |command: &mut Command| {
        command.args(NAMESPACES);
        let mut probe = Command::new(command.get_program());
        probe.args(command.get_args()).args(["sh", "-c", PROBE]);
        probe.output().is_ok_and(|output| output.status.success())
    };
    let Some(mut command) =
        [as_root, as_user].into_iter().find_map(|mut command| works(&mut command).then_some(command))
    else {
        assert!(env::var_os(WITHOUT).is_some_and(|set| set == "1"), "{test} cannot be run: {REMEDY}");
        print_line(&format!("SKIPPED {test}, as {WITHOUT}=1 allows: IT WAS NOT TESTED. {REMEDY}"));
        return false;
    };
    let own = env::current_exe().expect("a process knows its executable");
    // Builds need a network, which the namespaces do not have.
    etcd::built_binary();
    let status = command
        .arg(own)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .expect("unshare ran a moment ago");
    assert!(status.success(), "{test} failed in its own namespace");
    false
}

/// Runs this program again with the same arguments in its own network, mount and process namespaces, as root.
/// Returns only inside of them. All processes that the program starts end with it.
///
/// # Errors
/// What prevents the namespaces, with the remedy. On success, the first call does not return.
pub fn enter_own_namespaces() -> Result<(), String> {
    if is_in_own_namespaces() {
        return Ok(());
    }
    let probe = Command::new("unshare").args(NAMESPACES).args(["sh", "-c", PROBE]).output();
    let probe = probe.map_err(|error| format!("cannot run unshare ({error}): install util-linux"))?;
    if !probe.status.success() {
        let stderr = String::from_utf8_lossy(&probe.stderr);
        return Err(format!(
            "this user cannot create namespaces with a network: {}. Run as root, with the capabilities \
             CAP_SYS_ADMIN and CAP_NET_ADMIN",
            stderr.trim()
        ));
    }
    let own = env::current_exe().expect("a process knows its executable");
    let mut unshare = Command::new("unshare");
    unshare.args(NAMESPACES).arg(own).args(env::args_os().skip(1)).env(INSIDE, "1");
    // `unshare` replaces this process, enters the namespaces, and exits when the program does.
    unshare.env(OUTSIDE, std::process::id().to_string());
    Err(format!("cannot run unshare: {}", unshare.exec()))
}

/// Returns whether this program runs in its own namespaces.
pub fn is_in_own_namespaces() -> bool {
    env::var_os(INSIDE).is_some()
}

/// Returns the process id with which the machine can enter this program's namespaces, if it has its own.
pub fn outer_pid() -> Option<u32> {
    env::var(OUTSIDE).ok()?.parse().ok()
}

/// Removes the markers from a command's environment, so that it enters its own namespaces if it needs them.
pub fn outside_namespaces(mut command: Command) -> Command {
    command.env_remove(INSIDE).env_remove(OUTSIDE);
    command
}

impl Network {
    /// Creates a network without hosts, in this program's own namespaces.
    ///
    /// # Panics
    /// If the program is not in its own namespaces, or the system refuses.
    pub fn new() -> Network {
        assert!(is_in_own_namespaces(), "networks need the test's own namespaces");
        run("mount -t tmpfs none /run");
        run("ip link set lo up");
        run("ip link add hub type bridge");
        run(&format!("ip addr add {HUB}/24 dev hub"));
        run("ip link set hub up");
        Network { hosts: 0 }
    }

    /// Returns the test's own namespace as a host of the network.
    pub fn hub(&self) -> Host {
        Host { address: HUB, namespace: None }
    }

    /// Adds a route: packets of `from` to `to` go through a host.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn route(&self, from: &Host, to: &str, through: &Host) {
        let place = from.namespace.as_ref().map_or(String::new(), |namespace| format!("-n {namespace} "));
        run(&format!("ip {place}route add {to} via {}", through.address));
    }

    /// Sets the link of a host down.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn unplug(&self, host: &Host) {
        run(&format!("ip link set {} down", host.cable()));
    }

    /// Sets the link of a host up again.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn plug(&self, host: &Host) {
        run(&format!("ip link set {} up", host.cable()));
    }

    /// Adds one more host to the network.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn host(&mut self) -> Host {
        self.hosts += 1;
        let (number, name) = (self.hosts, format!("host{}", self.hosts));
        let address = Ipv4Addr::new(10, 77, 0, 10 + number);
        run(&format!("ip netns add {name}"));
        run(&format!("ip link add name far{number} type veth peer name near{number}"));
        run(&format!("ip link set near{number} netns {name}"));
        run(&format!("ip link set far{number} master hub up"));
        run(&format!("ip -n {name} link set lo up"));
        run(&format!("ip -n {name} addr add {address}/24 dev near{number}"));
        run(&format!("ip -n {name} link set near{number} up"));
        Host { address, namespace: Some(name) }
    }

    /// Drops all packets between two hosts.
    ///
    /// # Panics
    /// If the system refuses, or the hosts are cut off already.
    pub fn cut(&self, one: &Host, other: &Host) {
        Network::change("add", one, other);
    }

    /// Connects two hosts again.
    ///
    /// # Panics
    /// If the system refuses, or the hosts were not cut off.
    pub fn heal(&self, one: &Host, other: &Host) {
        Network::change("del", one, other);
    }

    fn change(what: &str, one: &Host, other: &Host) {
        for (here, there) in [(one, other), (other, one)] {
            run(&format!("ip -n {} route {what} blackhole {}/32", here.name(), there.address));
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let of_host = |number| [format!("ip link del far{number}"), format!("ip netns del host{number}")];
        let of_all = ["ip link del hub".to_owned(), "umount --recursive /run".to_owned()];
        for line in (1..=self.hosts).flat_map(of_host).chain(of_all) {
            // The rest ends with the test's process; a cluster checks for leftovers itself.
            let _ = Command::new("sh").args(["-c", &line]).output();
        }
    }
}

impl Default for Network {
    fn default() -> Network {
        Network::new()
    }
}

fn run(line: &str) {
    let mut words = line.split_whitespace();
    let program = words.next().expect("a command");
    let output = Command::new(program).args(words).output().unwrap_or_else(|error| panic!("{line}: {error}"));
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}
