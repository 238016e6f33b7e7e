//! Where processes of a test run: on loopback, or each on a host of its own in a network that the test has made.
//!
//! A [`Network`] is a bridge in a network namespace of the test's own process, and a namespace for each host, joined to the bridge
//! by a pair of virtual interfaces. Two hosts are cut off from each other by routes into nowhere: packets vanish, connections
//! stay open, as with a switch that has lost a path; a host whose cable is pulled reaches nobody. Nothing of it touches the network of
//! the machine. It goes with its handle, and at the latest with the test's process.

use std::env;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::etcd;
use crate::seed::say;

/// Says to a test's own executable that it runs in a namespace of its own.
const INSIDE: &str = "REPRISE_E2E_NAMESPACE";

/// Set to 1, tests that need namespaces are passed over where nobody can make any.
const WITHOUT: &str = "REPRISE_WITHOUT_NAMESPACES";

/// The program's process id as the machine sees it, whose namespaces are those that it runs in.
const OUTSIDE: &str = "REPRISE_E2E_OUTSIDE";

/// Where the bridge is reached, by which the machine itself is on the network.
const HUB: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// What a program gets of its own, which ends with it.
const NAMESPACES: [&str; 6] = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"];

/// All that a network is made with.
const PROBE: &str = "mount -t tmpfs none /run && ip netns add probe && ip netns exec probe true && ip link add hub type \
                     bridge && ip link add name far type veth peer name near && ip link set near netns probe";

/// What is missing, and what to do.
const REMEDY: &str = "this machine lets this user make no network namespaces. Install `unshare` (util-linux) and `ip` (iproute2), and run \
                      the tests as root or allow user namespaces (sysctl user.max_user_namespaces, and \
                      kernel.apparmor_restrict_unprivileged_userns=0 where that exists), bridges and veth pairs in them; or set \
                      REPRISE_WITHOUT_NAMESPACES=1 to go without partitions between hosts";

/// Where a process runs and listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    address: Ipv4Addr,
    /// Its network namespace; none: the test's own.
    namespace: Option<String>,
}

/// Hosts that reach each other, unless they are cut off.
#[derive(Debug)]
pub struct Network {
    hosts: u8,
}

impl Host {
    /// The machine itself, as its processes reach each other.
    pub const LOOPBACK: Host = Host { address: Ipv4Addr::LOCALHOST, namespace: None };

    /// Where it is reached.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The same command, run there.
    pub fn command(&self, command: Command) -> Command {
        let Some(namespace) = &self.namespace else { return command };
        // It becomes the command, so its process id and its end are the command's.
        let mut there = Command::new("ip");
        there.args(["netns", "exec", namespace]).arg(command.get_program()).args(command.get_args());
        there.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        there
    }

    /// The file that stands for its network namespace.
    ///
    /// # Panics
    /// When it is not a host of a network.
    pub fn namespace(&self) -> PathBuf {
        Path::new("/run/netns").join(self.name())
    }

    fn name(&self) -> &str {
        self.namespace.as_deref().expect("a host of a network")
    }

    /// The hub's end of its cable.
    fn cable(&self) -> String {
        self.name().replace("host", "far")
    }
}

/// Runs the calling test again in a network namespace of its own, unless it is in one: `true` there. `false`: the test has
/// been run and has passed, or is passed over on this machine as `REPRISE_WITHOUT_NAMESPACES=1` allows, which is said.
///
/// # Panics
/// When the test has failed, or cannot be run on this machine and may not be passed over.
pub fn in_own_namespace(test: &str) -> bool {
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
        say(&format!("SKIPPED {test}, as {WITHOUT}=1 allows: NOTHING OF IT IS TESTED. {REMEDY}"));
        return false;
    };
    let own = env::current_exe().expect("a process knows its executable");
    // What has to be built is built where there is a network.
    etcd::binary();
    let status = command
        .arg(own)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .expect("it was there a moment ago");
    assert!(status.success(), "{test} failed in its own namespace");
    false
}

/// Runs this program again, with the same arguments, as root in network, mount and process namespaces of its own, unless it is
/// there: it returns there. What the program starts ends with it, however it ends.
///
/// # Errors
/// Why it cannot be: in words, with what to do. It does not return from where it was called first otherwise.
pub fn enter_own_namespaces() -> Result<(), String> {
    if is_in_own_namespaces() {
        return Ok(());
    }
    let probe = Command::new("unshare").args(NAMESPACES).args(["sh", "-c", PROBE]).output();
    let probe = probe.map_err(|error| format!("unshare cannot be run ({error}): install util-linux"))?;
    if !probe.status.success() {
        let said = String::from_utf8_lossy(&probe.stderr);
        return Err(format!(
            "this user can make no namespaces with a network in them: {}. Run as root, with the capabilities \
             CAP_SYS_ADMIN and CAP_NET_ADMIN",
            said.trim()
        ));
    }
    let own = env::current_exe().expect("a process knows its executable");
    let mut again = Command::new("unshare");
    again.args(NAMESPACES).arg(own).args(env::args_os().skip(1)).env(INSIDE, "1");
    // This process becomes `unshare`, which enters the namespaces itself and stays until the program has ended.
    again.env(OUTSIDE, std::process::id().to_string());
    Err(format!("unshare cannot be run: {}", again.exec()))
}

/// Whether this program runs in namespaces of its own.
pub fn is_in_own_namespaces() -> bool {
    env::var_os(INSIDE).is_some()
}

/// The process id under which the machine can enter this program's namespaces, when it has some.
pub fn seen_from_outside() -> Option<u32> {
    env::var(OUTSIDE).ok()?.parse().ok()
}

/// A command that runs outside of what this program believes to be in: it enters namespaces of its own when it wants some.
pub fn apart(mut command: Command) -> Command {
    command.env_remove(INSIDE).env_remove(OUTSIDE);
    command
}

impl Network {
    /// A network without hosts; only in a namespace of one's own.
    ///
    /// # Panics
    /// Elsewhere, or when the system refuses.
    pub fn new() -> Network {
        assert!(is_in_own_namespaces(), "only in a namespace of one's own");
        run("mount -t tmpfs none /run");
        run("ip link set lo up");
        run("ip link add hub type bridge");
        run(&format!("ip addr add {HUB}/24 dev hub"));
        run("ip link set hub up");
        Network { hosts: 0 }
    }

    /// The test's own namespace, as the hosts reach it.
    pub fn hub(&self) -> Host {
        Host { address: HUB, namespace: None }
    }

    /// What is not of the network is found through this host.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn route(&self, from: &Host, to: &str, through: &Host) {
        let place = from.namespace.as_ref().map_or(String::new(), |namespace| format!("-n {namespace} "));
        run(&format!("ip {place}route add {to} via {}", through.address));
    }

    /// Pulls the host's cable.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn unplug(&self, host: &Host) {
        run(&format!("ip link set {} down", host.cable()));
    }

    /// Puts the host's cable in again.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn plug(&self, host: &Host) {
        run(&format!("ip link set {} up", host.cable()));
    }

    /// One more host.
    ///
    /// # Panics
    /// When the system refuses.
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

    /// From now on nothing of either arrives at the other.
    ///
    /// # Panics
    /// When the system refuses, or they are cut off already.
    pub fn cut(&self, one: &Host, other: &Host) {
        Network::change("add", one, other);
    }

    /// They reach each other again.
    ///
    /// # Panics
    /// When the system refuses, or they were not cut off.
    pub fn mend(&self, one: &Host, other: &Host) {
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
            // What stays goes with the test's process; a cluster looks for itself what has stayed.
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
