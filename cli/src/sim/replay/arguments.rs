//! Values of the arguments of `reprise sim replay`.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use reprise_policy::ByteSize;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionKind};

/// Policy of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyName {
    /// One of agents.
    Production(EvictionKind),
    /// `lru` of agents, with knowledge of the blocks that no later request uses.
    LruKnownEnds,
    /// The one that knows the future.
    Opt,
}

/// Policies that one name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PolicyNames(Vec<PolicyName>);

/// Size of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capacity {
    Blocks(u64),
    Bytes(u64),
}

/// Tier and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierSize {
    is_dram: bool,
    capacity: Capacity,
}

impl PolicyName {
    /// Name in arguments and results.
    pub(super) fn name(self) -> &'static str {
        match self {
            PolicyName::Production(kind) => kind.name(),
            PolicyName::LruKnownEnds => "lru_known_ends",
            PolicyName::Opt => "opt",
        }
    }

    /// Whether agents have the policy: others are bounds, of which only the hits are known.
    pub(super) fn is_of_agents(self) -> bool {
        matches!(self, PolicyName::Production(_))
    }
}

impl PolicyNames {
    /// Returns all named policies in their order, each once.
    pub(super) fn expand(names: &[PolicyNames]) -> Vec<PolicyName> {
        let mut policies = Vec::new();
        for name in names.iter().flat_map(|names| &names.0) {
            if !policies.contains(name) {
                policies.push(*name);
            }
        }
        policies
    }
}

impl FromStr for PolicyNames {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<PolicyNames> {
        let production = EvictionKind::ALL.map(PolicyName::Production);
        let all = || production.into_iter().chain([PolicyName::LruKnownEnds, PolicyName::Opt]);
        if text == "all" {
            return Ok(PolicyNames(all().collect()));
        }
        let found = all().find(|policy| policy.name() == text);
        let names = || all().map(PolicyName::name).collect::<Vec<_>>().join(", ");
        let found = found.with_context(|| format!("expected {} or all", names()))?;
        Ok(PolicyNames(vec![found]))
    }
}

impl Capacity {
    /// Returns the number of blocks.
    pub(super) fn blocks(self, block_bytes: u64) -> anyhow::Result<u64> {
        let blocks = match self {
            Capacity::Blocks(blocks) => blocks,
            Capacity::Bytes(bytes) => bytes / block_bytes,
        };
        ensure!(
            (1..u64::from(u32::MAX)).contains(&blocks),
            "invalid capacity of {blocks} blocks of {}: expected 1 block to 4 billion",
            ByteSize(block_bytes)
        );
        Ok(blocks)
    }
}

impl FromStr for Capacity {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Capacity> {
        if let Ok(blocks) = text.parse() {
            return Ok(Capacity::Blocks(blocks));
        }
        let bytes: ByteSize =
            text.parse().context("expected a number of blocks, or bytes with a unit as 64GiB")?;
        Ok(Capacity::Bytes(bytes.0))
    }
}

impl TierSize {
    /// Returns the sizes of DRAM and NVMe, if tiers were named.
    pub(super) fn both(tiers: &[TierSize]) -> anyhow::Result<Option<(Capacity, Option<Capacity>)>> {
        let of = |is_dram| {
            let mut sizes =
                tiers.iter().filter(move |tier| tier.is_dram == is_dram).map(|tier| tier.capacity);
            let first = sizes.next();
            ensure!(sizes.next().is_none(), "--tier names a tier twice: give each tier one size");
            Ok(first)
        };
        match (of(true)?, of(false)?) {
            (Some(dram), nvme) => Ok(Some((dram, nvme))),
            (None, None) => Ok(None),
            (None, Some(_)) => bail!("--tier without DRAM: blocks pass through DRAM, so add DRAM=BLOCKS"),
        }
    }
}

impl FromStr for TierSize {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<TierSize> {
        let (name, size) = text.split_once('=').context("expected DRAM=BLOCKS or NVMe=BLOCKS")?;
        let is_dram = match name.to_ascii_lowercase().as_str() {
            "dram" => true,
            "nvme" => false,
            _ => bail!("unknown tier {name}: expected DRAM or NVMe"),
        };
        Ok(TierSize { is_dram, capacity: size.parse()? })
    }
}

/// Parses the name of an admission rule.
pub(super) fn parse_admission(text: &str) -> Result<AdmissionMode, String> {
    let names = || AdmissionMode::ALL.map(AdmissionMode::name).join(", ");
    AdmissionMode::ALL
        .into_iter()
        .find(|mode| mode.name() == text)
        .ok_or_else(|| format!("expected one of {}", names()))
}

/// Parses the treatment of chains.
pub(super) fn parse_chains(text: &str) -> Result<Chains, String> {
    match text {
        "descendants_first" => Ok(Chains::DescendantsFirst),
        "ignored" => Ok(Chains::Ignored),
        _ => Err("expected descendants_first or ignored".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_once_and_an_unknown_one_is_refused_with_the_list() {
        let names = ["opt", "all"].map(|name| name.parse().expect("a name"));
        let policies = PolicyNames::expand(&names);
        assert_eq!((policies[0], policies.len()), (PolicyName::Opt, EvictionKind::ALL.len() + 2));
        let error = "belady".parse::<PolicyNames>().expect_err("unknown").to_string();
        assert!(error.contains("cost_aware") && error.contains("opt"), "{error}");
    }

    #[test]
    fn sizes_are_blocks_or_bytes_with_a_unit() {
        let blocks = |text: &str| text.parse::<Capacity>().and_then(|capacity| capacity.blocks(8 << 20));
        assert_eq!(blocks("1000").expect("blocks"), 1000);
        assert_eq!(blocks("1GiB").expect("bytes"), 128);
        assert!(format!("{:#}", blocks("1MiB").expect_err("less than a block")).contains("of 8MiB"));
        assert!(format!("{:#}", blocks("many").expect_err("no size")).contains("64GiB"));
    }

    #[test]
    fn tiers_have_dram_and_one_size_each() {
        let both = |text: &str| {
            let tiers = text.split(',').map(str::parse).collect::<anyhow::Result<Vec<TierSize>>>();
            tiers.and_then(|tiers| TierSize::both(&tiers))
        };
        let sizes = both("DRAM=10,nvme=20").expect("valid").expect("named");
        assert_eq!(sizes, (Capacity::Blocks(10), Some(Capacity::Blocks(20))));
        for (text, words) in [
            ("NVMe=5", "add DRAM=BLOCKS"),
            ("DRAM=1,DRAM=2", "twice"),
            ("HBM=1", "unknown tier HBM"),
            ("DRAM", "expected DRAM=BLOCKS"),
        ] {
            let error = format!("{:#}", both(text).expect_err(words));
            assert!(error.contains(words), "{error}");
        }
    }
}
