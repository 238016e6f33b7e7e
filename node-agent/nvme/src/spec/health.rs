//! SMART / Health Information log page (Base 2.0, 5.16.1.3).

use super::{HEALTH_BYTES, le};

/// Fields of the log page that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Critical warning; bit 0: spare capacity is below the threshold.
    pub warning: u8,
    /// Available spare in percent.
    pub spare_percent: u8,
    /// Percentage of the drive's rated life that was used; may exceed 100.
    pub used_percent: u8,
    /// Media and data integrity errors over the drive's life.
    pub media_errors: u64,
}

impl Health {
    /// Decodes the log page.
    pub fn decode(page: &[u8; HEALTH_BYTES]) -> Health {
        // A counter of 16 bytes; more than 2⁶⁴ errors are as bad as 2⁶⁴.
        let (low, high) = (le!(page, 160, u64), le!(page, 168, u64));
        Health {
            warning: page[0],
            spare_percent: page[3],
            used_percent: page[5],
            media_errors: if high == 0 { low } else { u64::MAX },
        }
    }

    /// Encodes the log page.
    pub fn encode(&self) -> [u8; HEALTH_BYTES] {
        let mut page = [0; HEALTH_BYTES];
        page[0] = self.warning;
        page[3] = self.spare_percent;
        page[5] = self.used_percent;
        page[160..168].copy_from_slice(&self.media_errors.to_le_bytes());
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_survives_its_encoding_and_a_huge_counter_saturates() {
        let health = Health { warning: 1, spare_percent: 93, used_percent: 120, media_errors: 5 };
        let mut page = health.encode();
        assert_eq!(Health::decode(&page), health);
        page[168] = 1;
        assert_eq!(Health::decode(&page).media_errors, u64::MAX);
    }
}
