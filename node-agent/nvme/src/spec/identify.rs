//! Data of Identify (Base 2.0, 5.17; NVM Command Set 1.0, 4.1.5).

use super::{IDENTIFY_BYTES, PAGE_BYTES, le};

/// Structures (CNS) of Identify.
pub mod cns {
    /// Identify Namespace data structure (NVM Command Set 1.0, 4.1.5.1).
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller data structure (Base 2.0, 5.17.2.1).
    pub const CONTROLLER: u8 = 0x01;
    /// Active Namespace ID list (Base 2.0, 5.17.2.2).
    pub const NAMESPACES: u8 = 0x02;
}

/// Fields of the Identify Controller data structure that this crate uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerIdentity {
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Maximum size of a transfer in bytes; `None` if unlimited.
    pub transfer_max: Option<u64>,
    /// Maximum number of outstanding Abort commands.
    pub aborts_max: u16,
    /// Maximum number of outstanding Asynchronous Event Requests.
    pub events_max: u16,
    /// Number of namespaces.
    pub namespaces: u32,
    /// The controller has the command Write Zeroes.
    pub write_zeroes: bool,
    /// The controller has a volatile write cache.
    pub write_cache: bool,
    /// The controller accepts SGLs for I/O commands, of pieces that are multiples of 4 bytes at such addresses.
    pub sgl: bool,
}

impl ControllerIdentity {
    /// Decodes the data of Identify.
    pub fn decode(data: &[u8; IDENTIFY_BYTES]) -> ControllerIdentity {
        let text = |range: std::ops::Range<usize>| {
            String::from_utf8_lossy(&data[range]).trim_matches(['\0', ' ']).to_owned()
        };
        let sgls = le!(data, 536, u32) & 3;
        ControllerIdentity {
            serial: text(4..24),
            model: text(24..64),
            firmware: text(64..72),
            // In units of the minimum page size, as a power of two. An absurd value does not limit transfers.
            transfer_max: match data[77] {
                0 => None,
                power => Some(1_u64.checked_shl(12 + u32::from(power)).unwrap_or(u64::MAX)),
            },
            aborts_max: u16::from(data[258]) + 1,
            events_max: u16::from(data[259]) + 1,
            namespaces: le!(data, 516, u32),
            write_zeroes: data[520] >> 3 & 1 == 1,
            write_cache: data[525] & 1 == 1,
            sgl: sgls == 1 || sgls == 2,
        }
    }

    /// Encodes the data of Identify.
    pub fn encode(&self) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut data = Box::new([0; IDENTIFY_BYTES]);
        let mut text = |range: std::ops::Range<usize>, text: &str| {
            data[range.clone()].fill(b' ');
            for (place, byte) in data[range].iter_mut().zip(text.bytes()) {
                *place = byte;
            }
        };
        text(4..24, &self.serial);
        text(24..64, &self.model);
        text(64..72, &self.firmware);
        let pages = |bytes: u64| (bytes / PAGE_BYTES as u64).max(1).ilog2() as u8;
        data[77] = self.transfer_max.map_or(0, pages);
        data[258] = (self.aborts_max - 1) as u8;
        data[259] = (self.events_max - 1) as u8;
        data[512] = 0x66; // SQES: 64 bytes
        data[513] = 0x44; // CQES: 16 bytes
        data[516..520].copy_from_slice(&self.namespaces.to_le_bytes());
        data[520] = u8::from(self.write_zeroes) << 3;
        data[525] = u8::from(self.write_cache);
        data[536..540].copy_from_slice(&u32::from(self.sgl).to_le_bytes());
        data
    }
}

/// Format of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaFormat {
    /// Size of the data of a block, as a power of two.
    pub data_power: u8,
    /// Size of the metadata of a block in bytes.
    pub metadata_bytes: u16,
}

/// Fields of the Identify Namespace data structure that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIdentity {
    /// Size in logical blocks; 0 for a namespace that is not active.
    pub blocks: u64,
    /// Format in use.
    pub format: LbaFormat,
    /// The namespace rejects writes.
    pub write_protected: bool,
}

impl NamespaceIdentity {
    /// Decodes the data of Identify.
    pub fn decode(data: &[u8; IDENTIFY_BYTES]) -> NamespaceIdentity {
        // FLBAS: bits 0 to 3 of the index of the format, and its two high bits in 5 and 6.
        let index = usize::from(data[26] & 0xf) | usize::from(data[26] >> 5 & 3) << 4;
        let at = 128 + 4 * index;
        NamespaceIdentity {
            blocks: le!(data, 0, u64),
            format: LbaFormat { metadata_bytes: le!(data, at, u16), data_power: data[at + 2] },
            write_protected: data[99] & 1 == 1,
        }
    }

    /// Encodes the data of Identify.
    pub fn encode(&self) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut data = Box::new([0; IDENTIFY_BYTES]);
        for at in [0, 8, 16] {
            data[at..at + 8].copy_from_slice(&self.blocks.to_le_bytes());
        }
        data[99] = u8::from(self.write_protected);
        data[128..130].copy_from_slice(&self.format.metadata_bytes.to_le_bytes());
        data[130] = self.format.data_power;
        data
    }
}

/// Active Namespace ID list: identifiers in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceList(pub Vec<u32>);

impl NamespaceList {
    /// Decodes the data; the first 0 ends the list.
    pub fn decode(data: &[u8; IDENTIFY_BYTES]) -> NamespaceList {
        let all = data.chunks_exact(4).map(|id| le!(id, 0, u32));
        NamespaceList(all.take_while(|id| *id != 0).collect())
    }

    /// Encodes the first 1,024 identifiers.
    pub fn encode(&self) -> Box<[u8; IDENTIFY_BYTES]> {
        let mut data = Box::new([0; IDENTIFY_BYTES]);
        for (place, id) in data.chunks_exact_mut(4).zip(&self.0) {
            place.copy_from_slice(&id.to_le_bytes());
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_survives_its_encoding() {
        let identity = ControllerIdentity {
            serial: "S1".into(),
            model: "A model".into(),
            firmware: "1.0".into(),
            transfer_max: Some(512 << 10),
            aborts_max: 4,
            events_max: 4,
            namespaces: 2,
            write_zeroes: true,
            write_cache: true,
            sgl: true,
        };
        assert_eq!(ControllerIdentity::decode(&identity.encode()), identity);
        let without = ControllerIdentity { transfer_max: None, sgl: false, ..identity };
        assert_eq!(ControllerIdentity::decode(&without.encode()), without);
    }

    #[test]
    fn an_absurd_transfer_limit_does_not_limit() {
        let mut data = [0; IDENTIFY_BYTES];
        for power in [52, 63, 64, 255] {
            data[77] = power;
            assert_eq!(ControllerIdentity::decode(&data).transfer_max, Some(u64::MAX), "{power}");
        }
        data[77] = 51;
        assert_eq!(ControllerIdentity::decode(&data).transfer_max, Some(1 << 63));
    }

    #[test]
    fn a_namespace_survives_its_encoding() {
        let format = LbaFormat { data_power: 12, metadata_bytes: 8 };
        let identity = NamespaceIdentity { blocks: 1 << 33, format, write_protected: true };
        assert_eq!(NamespaceIdentity::decode(&identity.encode()), identity);
    }

    #[test]
    fn the_format_index_has_six_bits() {
        let mut data = [0; IDENTIFY_BYTES];
        data[26] = 1 << 5 | 2; // index 18
        data[128 + 4 * 18 + 2] = 9;
        assert_eq!(NamespaceIdentity::decode(&data).format.data_power, 9);
    }

    #[test]
    fn a_list_ends_at_its_first_zero() {
        let list = NamespaceList(vec![1, 2, 9]);
        assert_eq!(NamespaceList::decode(&list.encode()), list);
    }
}
