//! Metrics of tenants' usage and quotas, with a bounded label.
//!
//! The first 32 tenants have their own label, configured ones first; the others are summed under `other`. A
//! tenant keeps its label until the agent exits, so no counter decreases.

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use reprise_agent_core::TenantUsage;
use reprise_policy::TenantId;

use super::Kind;
use super::tables::TENANT;

/// Maximum number of tenants with a label; each has 13 metrics.
const TENANTS_NAMED_MAX: usize = 32;

/// Label of all other tenants. Tenant names cannot contain a dot.
const OTHER: &str = "other.";

/// One row of values for each label.
#[derive(Debug, Default)]
pub(crate) struct TenantRows {
    rows: Vec<(String, [u64; TENANT.len()])>,
}

impl TenantRows {
    /// Builds the rows of these tenants; `name` maps numbers to names.
    pub(crate) fn new(usage: &[TenantUsage], name: impl Fn(TenantId) -> String) -> TenantRows {
        let mut rows: Vec<(String, [u64; TENANT.len()])> = Vec::new();
        for (at, tenant) in usage.iter().enumerate() {
            let values = tenant.fields().map(|(_, value)| value);
            if at < TENANTS_NAMED_MAX {
                rows.push((name(tenant.tenant), values));
                continue;
            }
            if at == TENANTS_NAMED_MAX {
                rows.push((OTHER.to_owned(), [0; TENANT.len()]));
            }
            let sums = &mut rows.last_mut().expect("the row was just added").1;
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.saturating_add(value));
        }
        TenantRows { rows }
    }

    /// Writes one metric after the other, each with all labels.
    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        if self.rows.is_empty() {
            return Ok(());
        }
        for (at, metric) in TENANT.iter().enumerate() {
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            for (tenant, values) in &self.rows {
                let labels = [("tenant", tenant.as_str())];
                let sample = family.encode_family(&labels)?;
                match metric.kind {
                    Kind::Counter => ConstCounter::new(values[at]).encode(sample)?,
                    Kind::Gauge => {
                        ConstGauge::new(i64::try_from(values[at]).unwrap_or(i64::MAX)).encode(sample)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reprise_agent_core::{TenantBlocks, TenantCounts};
    use reprise_policy::Quota;
    use reprise_policy::block_command::RetentionUsage;
    use reprise_policy::quota::QuotaUsage;

    use super::*;

    fn usage(tenant: u16) -> TenantUsage {
        let holding = QuotaUsage { quota: Quota::UNLIMITED, used: 10 };
        let counts = TenantCounts { dram_evictions: 1, ..TenantCounts::default() };
        let blocks = TenantBlocks::default();
        let retention = RetentionUsage::default();
        let (dram, nvme) = (holding, holding);
        TenantUsage { tenant: TenantId(tenant), grant: None, dram, nvme, blocks, counts, retention }
    }

    #[test]
    fn tenant_fields_are_described_in_order() {
        let described: Vec<&str> = TENANT.iter().map(|metric| metric.name).collect();
        assert_eq!(described, usage(0).fields().map(|(name, _)| name));
    }

    #[test]
    fn tenants_beyond_the_first_32_are_summed() {
        let all: Vec<TenantUsage> = (0..40).map(usage).collect();
        let rows = TenantRows::new(&all, |tenant| format!("t{}", tenant.0)).rows;
        assert_eq!(rows.len(), 33);
        assert_eq!((rows[31].0.as_str(), rows[31].1[0]), ("t31", 10));
        assert_eq!((rows[32].0.as_str(), rows[32].1[0], rows[32].1[6]), ("other.", 80, 8));
    }
}
