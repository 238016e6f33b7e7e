//! Settings of the pool: its devices, and the limits of their writes.

use reprise_io::{DeviceDescription, Reserve};
use reprise_policy::ByteSize;
use reprise_policy::admission::budget::DailyBudget;

use super::{
    DEVICES_MAX, DeviceSettings, HUGE_PAGE_BYTES, PoolSection, PoolSettings, SEGMENT_BYTES_MAX,
    SessionSection, refuse, size,
};
use crate::error::AgentError;

/// Smallest budget: below it, the burst would not hold a block of most models.
const BUDGET_MIN: u64 = 1 << 30;

impl PoolSection {
    pub(super) fn validate(&self, session: &SessionSection) -> Result<PoolSettings, AgentError> {
        let (lend_extents, lend_queues) = (session.extents, session.queue_pairs > 0);
        size(
            "pool.segment_bytes",
            self.segment_bytes.0,
            (HUGE_PAGE_BYTES, SEGMENT_BYTES_MAX, HUGE_PAGE_BYTES),
        )?;
        if !(1..=1024).contains(&self.queue_depth) {
            return Err(refuse("pool.queue_depth", &self.queue_depth.to_string(), "1 to 1024"));
        }
        if self.devices.len() > DEVICES_MAX {
            let found = format!("{} devices", self.devices.len());
            return Err(refuse("pool.devices", &found, &format!("at most {DEVICES_MAX}")));
        }
        let reserve = self.reserve_bytes.map_or(Reserve::Default, |bytes| Reserve::Bytes(bytes.0));
        let mut devices: Vec<DeviceSettings> = Vec::with_capacity(self.devices.len());
        for section in &self.devices {
            let device = section.validate(reserve)?;
            if devices.iter().any(|other| other.description.is_same_device(&device.description)) {
                let field = match device.description {
                    DeviceDescription::Path(_) => "pool.devices.path",
                    DeviceDescription::Controller(_) => "pool.devices.pci",
                    DeviceDescription::Emulated(_) => "pool.devices.emulated",
                };
                return Err(refuse(field, &device.description.to_string(), "each device once"));
            }
            devices.push(device);
        }
        let PoolSection { queue_depth, io_engine, eviction, admission, .. } = *self;
        let daily_write_budget = write_budget(self.daily_write_budget, self.write_burst)?;
        let segment_bytes = self.segment_bytes.0;
        Ok(PoolSettings {
            segment_bytes,
            queue_depth,
            io_engine,
            eviction,
            admission,
            daily_write_budget,
            reserve,
            lend_extents,
            lend_queues,
            devices,
        })
    }
}

/// Validates a budget and its burst.
fn write_budget(
    budget: Option<ByteSize>,
    burst: Option<ByteSize>,
) -> Result<Option<DailyBudget>, AgentError> {
    let Some(ByteSize(bytes)) = budget else {
        if let Some(burst) = burst {
            let allowed = "no burst without pool.daily_write_budget: set the budget, or remove the burst";
            return Err(refuse("pool.write_burst", &burst.to_string(), allowed));
        }
        return Ok(None);
    };
    if bytes == 0 {
        let allowed = "1GiB or more: remove the budget for unlimited writes, or set pool.admission = \"second_use\" for \
                       fewer; for no writes at all, remove pool.devices";
        return Err(refuse("pool.daily_write_budget", "0", allowed));
    }
    if bytes < BUDGET_MIN {
        let found = ByteSize(bytes).to_string();
        return Err(refuse("pool.daily_write_budget", &found, "1GiB or more"));
    }
    let Some(ByteSize(burst)) = burst else { return Ok(Some(DailyBudget::new(bytes))) };
    if burst == 0 || burst > bytes / 2 {
        let allowed = format!("1 to {}, half of pool.daily_write_budget", ByteSize(bytes / 2));
        return Err(refuse("pool.write_burst", &ByteSize(burst).to_string(), &allowed));
    }
    Ok(Some(DailyBudget { bytes, burst }))
}

#[cfg(test)]
mod tests {
    use reprise_policy::admission::AdmissionMode;
    use reprise_policy::admission::budget::DailyBudget;

    use crate::config::Config;

    fn error(text: &str) -> String {
        match Config::parse(text) {
            Ok(config) => config.validate().expect_err("invalid").to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn admission_and_budget_are_read_and_invalid_ones_are_refused_with_a_remedy() {
        let text = "[pool]\nadmission = \"second_use\"\ndaily_write_budget = \"100GiB\"";
        let pool = Config::parse(text).expect("parses").validate().expect("valid").pool;
        assert_eq!(pool.admission, AdmissionMode::SecondUse);
        assert_eq!(pool.daily_write_budget, Some(DailyBudget { bytes: 100 << 30, burst: (100 << 30) / 100 }));
        let text = "[pool]\ndaily_write_budget = \"100GiB\"\nwrite_burst = \"20GiB\"";
        let pool = Config::parse(text).expect("parses").validate().expect("valid").pool;
        assert_eq!(pool.daily_write_budget, Some(DailyBudget { bytes: 100 << 30, burst: 20 << 30 }));
        for (text, words) in [
            ("[pool]\ndaily_write_budget = \"0\"", ["pool.daily_write_budget", "remove the budget"]),
            ("[pool]\ndaily_write_budget = \"1MiB\"", ["pool.daily_write_budget", "1GiB or more"]),
            ("[pool]\nwrite_burst = \"1GiB\"", ["pool.write_burst", "set the budget"]),
            (
                "[pool]\ndaily_write_budget = \"2GiB\"\nwrite_burst = \"2GiB\"",
                ["pool.write_burst", "1GiB, half"],
            ),
            ("[pool]\nadmission = \"never\"", ["never", "expected_reuse"]),
        ] {
            let error = error(text);
            assert!(words.iter().all(|word| error.contains(word)), "{text:?} gave: {error}");
        }
        let unknown = error("[pool]\nadmission = \"never\"");
        assert!(AdmissionMode::ALL.iter().all(|mode| unknown.contains(mode.name())), "{unknown}");
    }
}
