//! Legs that another cache has no time for, and why: they are said beside the figures rather than left out.

use serde::Serialize;

use super::samples::{Leg, System};
use crate::output::{Audience, Table};

/// A leg without a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Absence {
    /// As the figure would be called.
    pub(super) name: String,
    /// Whose leg it is, for people.
    system: &'static str,
    /// Why there is no time.
    pub(super) why: String,
}

impl Absence {
    pub(super) fn new(system: System, leg: Leg, why: String) -> Absence {
        Absence { name: format!("vllm.{}.{}", system.name(), leg.name()), system: system.words(), why }
    }
}

impl System {
    /// Why there is no such leg, or none that would say something; none: it is measured.
    pub(super) fn lacks(self, leg: Leg) -> Option<&'static str> {
        match (self, leg) {
            (System::Example, Leg::Peer) => Some(
                "it keeps files in a folder: another node has them over a file system that others provide",
            ),
            (System::MooncakeSameHost, Leg::Peer) => {
                Some("memory of another process over TCP is measured by itself, as mooncake_tcp")
            }
            (System::MooncakeTcp, Leg::Peer) => {
                Some("what is called dram here is memory of another process over TCP")
            }
            (System::MooncakeSameHost | System::MooncakeTcp, Leg::Nvme) => Some(
                "its store moves what leaves memory to an SSD in buckets of 256 MB or 500 keys: a prompt cannot be put there alone",
            ),
            (System::MooncakeSameHost, Leg::Restart) => Some("its memory is the engine's, and goes with it"),
            (System::MooncakeTcp, Leg::Restart) => Some(
                "its memory goes with the store's process, and a store that is started anew does not read the files of the one before",
            ),
            (System::Lmcache, Leg::Peer) => Some(
                "its server fetches from others over NIXL or Mooncake's engine, with a coordinator, which are not installed",
            ),
            _ => None,
        }
    }
}

/// Prints them: a table for people, a line each for programs.
pub(super) fn print(audience: Audience, absences: &[Absence]) {
    if absences.is_empty() {
        return;
    }
    let mut table = Table::new(&["not measured", "of", "why"]);
    for absence in absences {
        audience.emit(absence);
        table.row(vec![absence.name.clone(), absence.system.to_owned(), absence.why.clone()]);
    }
    audience.say(table.render());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_found_on_a_device_and_after_a_restart_where_a_cache_keeps_files() {
        for system in [System::Reprise, System::Example, System::Lmcache] {
            assert_eq!((system.lacks(Leg::Nvme), system.lacks(Leg::Restart)), (None, None));
        }
        for system in [System::MooncakeSameHost, System::MooncakeTcp] {
            assert!(system.lacks(Leg::Nvme).is_some() && system.lacks(Leg::Restart).is_some());
        }
    }
}
