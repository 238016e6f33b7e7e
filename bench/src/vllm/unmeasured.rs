//! Legs that were not measured for another cache, with the reason. The report lists them next to the figures.

use serde::Serialize;

use super::samples::{Leg, System};
use reprise_testkit::output::{Audience, Table};

/// A leg that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct UnmeasuredLeg {
    /// Name that the figure would have.
    pub(super) name: String,
    /// Display name of the system.
    system: &'static str,
    /// Reason why the leg was not measured.
    pub(super) why: String,
}

impl UnmeasuredLeg {
    pub(super) fn new(system: System, leg: Leg, why: String) -> UnmeasuredLeg {
        UnmeasuredLeg { name: format!("vllm.{}.{}", system.name(), leg.name()), system: system.words(), why }
    }
}

impl System {
    /// Returns the reason why a leg does not exist or is not meaningful for the system; `None` if it is
    /// measured.
    pub(super) fn lacks(self, leg: Leg) -> Option<&'static str> {
        match (self, leg) {
            (System::Example, Leg::Peer) => Some(
                "it stores files in a folder: another node can read them only through a shared file system",
            ),
            (System::MooncakeSameHost, Leg::Peer) => {
                Some("memory of another process over TCP is a separate system, mooncake_tcp")
            }
            (System::MooncakeTcp, Leg::Peer) => {
                Some("its leg dram already reads memory of another process over TCP")
            }
            (System::MooncakeSameHost | System::MooncakeTcp, Leg::Nvme) => Some(
                "its store moves evicted memory to an SSD in buckets of 256 MB or 500 keys: a single prompt cannot be moved there",
            ),
            (System::MooncakeSameHost, Leg::Restart) => {
                Some("its memory belongs to the engine's process and is lost with it")
            }
            (System::MooncakeTcp, Leg::Restart) => Some(
                "its memory is lost with the store's process, and a restarted store does not read existing files",
            ),
            (System::Lmcache, Leg::Peer) => Some(
                "its server needs NIXL or Mooncake's engine and a coordinator to load from peers, which are not installed",
            ),
            _ => None,
        }
    }
}

/// Prints the legs as a table, or one JSON object per line.
pub(super) fn print(audience: Audience, unmeasured: &[UnmeasuredLeg]) {
    if unmeasured.is_empty() {
        return;
    }
    let mut table = Table::new(&["not measured", "system", "reason"]);
    for leg in unmeasured {
        audience.emit(leg);
        table.row(vec![leg.name.clone(), leg.system.to_owned(), leg.why.clone()]);
    }
    audience.print_line(table.render());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_with_files_are_measured_on_a_device_and_after_a_restart() {
        for system in [System::Reprise, System::Example, System::Lmcache] {
            assert_eq!((system.lacks(Leg::Nvme), system.lacks(Leg::Restart)), (None, None));
        }
        for system in [System::MooncakeSameHost, System::MooncakeTcp] {
            assert!(system.lacks(Leg::Nvme).is_some() && system.lacks(Leg::Restart).is_some());
        }
    }
}
