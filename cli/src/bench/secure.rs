//! `reprise bench secure`: what encryption costs, against the same operations without it, in one run.
//!
//! | part | measured | against |
//! |---|---|---|
//! | [`records`] | encryption and decryption of records on one core | – |
//! | [`peer_load`] | loads from a peer over TLS, on loopback | the same loads without TLS |
//! | [`look_ups`] | look-ups at a member with TLS | the same look-ups at a member without TLS |
//! | [`at_rest`] | loads and saves of a tenant with a key | those of a tenant without one, at the same agent |
//!
//! The last two need other processes. The first line states the machine, its load, and where records are encrypted.

mod at_rest;
mod look_ups;
mod peer_load;
mod records;

use anyhow::{Context, ensure};
use reprise_identity::authority::{Authority, CERTIFICATE_VALID};
use reprise_identity::{Identity, Role, Tls};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::Figure;
use serde::Serialize;

pub(super) use at_rest::{ARENA_MIB, pool_mib};
pub(super) use peer_load::MEMORY_BYTES;

/// Name of the cluster in the certificates of the benchmark.
const CLUSTER: &str = "bench";

/// What the figures that follow were measured on.
#[derive(Debug, Serialize)]
struct Machine {
    benchmark: &'static str,
    /// Cores that this process may use.
    cores: usize,
    /// Load average of one, five and fifteen minutes before the run: other work takes from both sides of a ratio, and
    /// makes it less exact.
    load_average: [f64; 3],
    /// Where records are encrypted.
    records: String,
    /// Why some of the figures are missing.
    reason: Option<String>,
}

/// Measures all parts in turn.
pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let cases = peer_load::Case::possible()?;
    let machine = Machine {
        benchmark: "secure",
        cores: peer_load::allowed_cores()?.len(),
        load_average: load_average()?,
        records: reprise_transport::record_layer(),
        reason: peer_load::Case::missing(&cases),
    };
    settings.audience.emit(&machine);
    let Machine { cores, load_average: [minute, ..], records, reason, .. } = machine;
    let missing = reason.map(|reason| format!("; {reason}")).unwrap_or_default();
    settings
        .audience
        .print_line(format!("{cores} cores, load average {minute}, records: {records}{missing}"));
    let mut figures = records::run(settings)?;
    for case in cases {
        figures.push(peer_load::run(case, settings)?);
    }
    figures.extend(look_ups::run(settings)?);
    figures.extend(at_rest::run(settings)?);
    Ok(figures)
}

/// Load average of one, five and fifteen minutes.
fn load_average() -> anyhow::Result<[f64; 3]> {
    let text = std::fs::read_to_string("/proc/loadavg").context("cannot read the load average")?;
    let numbers: Vec<f64> =
        text.split_whitespace().take(3).map(str::parse).collect::<Result<_, _>>().context("/proc/loadavg")?;
    numbers.try_into().map_err(|_| anyhow::anyhow!("/proc/loadavg has no three numbers"))
}

/// Certificates of the agents of these nodes, of one cluster.
fn agents<const COUNT: usize>(nodes: [&str; COUNT]) -> anyhow::Result<[Tls; COUNT]> {
    let authority = Authority::create(CLUSTER)?;
    let tls = |node: &str| {
        let identity = Identity::new(CLUSTER, Role::Agent(node.to_owned()))?;
        let issued = authority.issue(&identity, CERTIFICATE_VALID)?;
        anyhow::Ok(Tls::new(issued.into_credentials(authority.certificate())?))
    };
    let made: Vec<Tls> = nodes.into_iter().map(tls).collect::<Result<_, _>>()?;
    ensure!(made.len() == COUNT, "one certificate for each node");
    Ok(made.try_into().expect("the number was checked"))
}

#[cfg(test)]
mod tests {
    use reprise_testkit::output::Audience;

    use super::*;

    #[test]
    fn every_part_has_figures_of_this_machine() {
        let settings =
            Settings { directory: std::env::temp_dir(), repetitions: 1, audience: Audience::Program };
        let figures = run(&settings).expect("it runs");
        assert!(figures.iter().all(|figure| figure.value > 0.0), "{figures:?}");
        let ratios = figures.iter().filter_map(|figure| figure.ratio);
        assert!(ratios.count() >= 1, "{figures:?}");
    }
}
