//! The controller memory buffer: memory of the controller, for queues, lists and data.

use crate::backing::{Backing, DmaMemory};
use crate::controller::Controller;
use crate::error::NvmeError;
use crate::spec::{MemoryBufferControl, MemoryBufferProperties, offset};

impl<B: Backing> Controller<B> {
    /// Maps the controller's memory buffer (Base 2.0, 8.5) and enables it at the address of the returned memory. It
    /// stays enabled until the controller is started again; call this once.
    ///
    /// # Errors
    /// `Unsupported` if the controller has none, or one whose address cannot be chosen, as before version 1.4.
    pub fn memory_buffer(&mut self) -> Result<(MemoryBufferProperties, B::Memory), NvmeError> {
        let without = |text: &str| Err(NvmeError::Unsupported(text.into()));
        if !self.capabilities.has_memory_buffer() {
            return without("it has no memory buffer with a configurable address (CAP.CMBS)");
        }
        set(&*self.backing, MemoryBufferControl { registers: true, address: None });
        let (location, size) = (self.backing.read(offset::CMBLOC), self.backing.read(offset::CMBSZ));
        let properties = MemoryBufferProperties::decode(location, size);
        if properties.bytes == 0 {
            return without("its memory buffer has 0 bytes");
        }
        let memory = self.backing.map_own_bar(properties.bar, properties.offset, properties.bytes)?;
        let address = Some(memory.address());
        set(&*self.backing, MemoryBufferControl { registers: true, address });
        Ok((properties, memory))
    }
}

/// Withdraws the address of the buffer.
pub(super) fn disable(backing: &impl Backing) {
    set(backing, MemoryBufferControl { registers: false, address: None });
}

/// Writes CMBMSC, high half first: a write of the low half makes the controller take the whole address.
fn set(backing: &impl Backing, control: MemoryBufferControl) {
    let value = control.encode();
    backing.write(offset::CMBMSC + 4, (value >> 32) as u32);
    backing.write(offset::CMBMSC, value as u32);
}
